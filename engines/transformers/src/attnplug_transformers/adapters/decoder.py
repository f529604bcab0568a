"""Decoders with softmax attention: what modules ask of transformers' ``AttentionInterface`` becomes a layer call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from attnplug.batch import ForwardBatch
from attnplug.errors import UnsupportedModel
from attnplug.kv.pools import KVPool, MHAKVPool
from attnplug.layer import AttentionLayer
from attnplug.model_spec import ModelSpec
from attnplug.spec import Kind

from ..attention import AttentionStep, ModelLoan, attention_step
from .base import Adapter, Bridge, PoolSizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..backends import Serving
    from ..sizes import EngineSizes

__all__ = ["DecoderAdapter", "InterfaceBridge"]


class InterfaceBridge(Bridge):
    """Serves what modules ask of the ``AttentionInterface``; others build on it by overriding ``attend``.

    Args:
        model: Whose attention is served.
        layers: The layer of each of its attention modules.
    """

    def __init__(self, model: PreTrainedModel, layers: Mapping[nn.Module, AttentionLayer]) -> None:
        self.model, self.layers = model, layers
        self._loan, self._checked = ModelLoan(model), False

    @contextmanager
    def serve(self, batch: ForwardBatch) -> Iterator[None]:
        """Lend the model the backend; the first step is checked call by call.

        Raises:
            UnsupportedModel: In the first step: a module's attention is not what its layer says, or did not come here.
        """
        step = AttentionStep(batch, self.layers, None if self._checked else [], self.attend)
        with self._loan(), attention_step(step):
            yield
        if step.seen is not None:
            self._check_first(step.seen)

    def attend(
        self, module: nn.Module, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """Return a module's attention.

        Args:
            module: Who asks.
            layer: Its layer.
            q: [T, Hq, D], a view, as are k and v.
            k: [T, Hk, D].
            v: [T, Hk, Dv].
            batch: The step.

        Returns:
            [T, Hq, Dv].
        """
        out: Tensor = layer(q, k, v, batch).out
        return out

    def _check_first(self, seen: list[nn.Module]) -> None:
        silent = [layer.layer_id for module, layer in self.layers.items() if module not in seen]
        if silent:
            raise UnsupportedModel(
                f"{type(self.model).__name__} computed attention by itself in layers {silent}, not through "
                "transformers' AttentionInterface",
                remedy="serve a model whose every layer takes its attention from there",
            )
        self._checked = True


class DecoderAdapter(Adapter):
    """Grouped softmax attention over one pool of keys and values."""

    kinds = frozenset({Kind.SOFTMAX})

    def make_pool(self, spec: ModelSpec, sizes: PoolSizes) -> KVPool:
        return MHAKVPool(
            spec.layers,
            num_pages=sizes.num_pages,
            page_size=sizes.page_size,
            dtype=sizes.dtype,
            device=sizes.device,
            layout=sizes.layout,
        )

    def make_bridge(
        self,
        model: PreTrainedModel,
        layers: Mapping[nn.Module, AttentionLayer],
        serving: Serving,
        sizes: EngineSizes,
    ) -> Bridge:
        return InterfaceBridge(model, layers)
