"""What an adapter decides for a family's models: pools, layers, and how a module's attention becomes layer calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from attnplug.batch import ForwardBatch
from attnplug.errors import ContractViolation
from attnplug.kv.pools import KVPool
from attnplug.layer import AttentionLayer
from attnplug.model_spec import ModelSpec
from attnplug.spec import Kind

from ..sites import make_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..backends import Serving
    from ..batch_builder import StepInputs
    from ..encoder_batch import EncoderStep
    from ..sizes import EngineSizes

__all__ = ["Adapter", "Bridge", "PoolSizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """What an engine has chosen for its pools."""

    num_pages: int
    page_size: int
    dtype: torch.dtype
    device: torch.device
    num_encoder_pages: int = 0
    """Of the encoder space; 0 where the model has none."""
    layout: str
    """'NHD' or 'HND', as the backends agreed; pools that know one layout have theirs."""


class Bridge(ABC):
    """One engine's hold on one model: lends it the backend for the length of a step."""

    layers: Mapping[nn.Module, AttentionLayer]
    """The layer of each attention module."""
    mixes: bool = True
    """Whether prompt chunks and decode rows may share a step, where the backend takes that."""

    @abstractmethod
    def serve(self, batch: ForwardBatch) -> AbstractContextManager[None]:
        """Return a context in which a call of the model has its attention served for ``batch``.

        On leaving it, also by an exception, the model is as its owner left it.
        """

    def encode(self, step: EncoderStep) -> None:
        """Run the encoder over new requests' inputs, before ``inputs`` is asked; in the context of ``serve``.

        Raises:
            ContractViolation: This bridge knows no encoder.
        """
        raise ContractViolation(
            f"{type(self).__name__} was given {len(step.inputs)} inputs of an encoder, and bridges none",
            remedy="give the family an adapter whose bridge encodes",
        )

    def inputs(self, step: StepInputs) -> dict[str, Any]:
        """Return the arguments of the model's forward, beside ``logits_to_keep``."""
        return {
            "input_ids": step.input_ids.unsqueeze(0),
            "position_ids": step.batch.positions.unsqueeze(0),
            "use_cache": False,
        }


class Adapter(ABC):
    """How models of some families are served. Has no state; one is made for each engine.

    A family names its adapter (``Family.adapter``), so a third party adds one by an entry point of
    ``attnplug_transformers.families.v1`` whose ``Family`` names it.
    """

    kinds: ClassVar[frozenset[Kind]]
    """The kinds of layers that are bridged; a model with others is refused before its weights load."""

    @abstractmethod
    def make_pool(self, spec: ModelSpec, sizes: PoolSizes) -> KVPool:
        """Return the pool, or several behind one, in which the model's layers keep what they cache."""

    def make_layers(self, model: PreTrainedModel, spec: ModelSpec) -> dict[nn.Module, AttentionLayer]:
        """Return the layer of each attention module, compared with the ModelSpec.

        Raises:
            UnsupportedModel: The modules are not what the spec says.
        """
        return make_layers(model, spec)

    def feature_shape(self, model: PreTrainedModel) -> tuple[int, ...] | None:
        """Return the shape of one input of the encoder; None where tokens go in, or there is no encoder."""
        return None

    @abstractmethod
    def make_bridge(
        self,
        model: PreTrainedModel,
        layers: Mapping[nn.Module, AttentionLayer],
        serving: Serving,
        sizes: EngineSizes,
    ) -> Bridge:
        """Return the bridge of a model to a backend that has been built.

        Raises:
            AttnplugError: The model cannot be bridged, or the backend lacks what the bridge needs.
        """
