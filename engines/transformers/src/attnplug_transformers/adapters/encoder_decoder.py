"""Encoder-decoders: an encoder once a request, its keys in a space of their own, and a decoder that reads both."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnplug.batch import ForwardBatch
from attnplug.errors import UnsupportedModel
from attnplug.kv.pools import KVPool, MHAKVPool, SpacedKVPool
from attnplug.layer import AttentionLayer
from attnplug.model_spec import ModelSpec
from attnplug.modes import AttentionType, KVSpace
from attnplug.spec import Kind

from ..sites import pair_layers
from .base import Adapter, Bridge, PoolSizes
from .decoder import InterfaceBridge
from .pooled_cache import PooledCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..backends import Serving
    from ..batch_builder import StepInputs
    from ..encoder_batch import EncoderStep
    from ..sizes import EngineSizes

__all__ = ["EncoderDecoderAdapter", "EncoderDecoderBridge", "WhisperAdapter"]


class EncoderDecoderBridge(InterfaceBridge):
    """Serves an encoder's rows, and a decoder's over both spaces.

    Args:
        model: Whose attention is served.
        layers: The layer of each of its attention modules.
    """

    def __init__(self, model: PreTrainedModel, layers: Mapping[nn.Module, AttentionLayer]) -> None:
        super().__init__(model, layers)
        self._encoder: Any = model.get_encoder()
        self._decoder: Any = model.get_decoder()
        parts = {"decoder": self._decoder} if self._takes_features else {"decoder": self._decoder, "encoder": None}
        self._positions = [_positions_of(name, part or self._encoder) for name, part in parts.items()]
        # Its older name is deprecated where the newer is there.
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        crossing = [layer for layer in layers.values() if layer.is_cross_attention]
        self._cache = PooledCache(crossing, dtype=model.dtype, device=model.device)
        self._nothing = torch.empty(1, 0, self._decoder.config.d_model, dtype=model.dtype, device=model.device)
        self._encoded, self._encoder_batch = self._nothing, None

    _encoded: Tensor
    """[1, rows, d]: what the encoder made in this step."""
    _encoder_batch: ForwardBatch | None

    @property
    def _takes_features(self) -> bool:
        return bool(self._encoder.main_input_name != "input_ids")

    @contextmanager
    def serve(self, batch: ForwardBatch) -> Iterator[None]:
        """Lend the model the backend, and give its learned positions those of the packed rows."""
        with ExitStack() as stack:
            # They count from 0 in each row of a batch otherwise.
            for module, encodes in zip(self._positions, (False, True)):
                hook = module.register_forward_pre_hook(self._at(batch, encodes=encodes), with_kwargs=True)
                stack.callback(hook.remove)
            stack.callback(self._forget)
            stack.enter_context(super().serve(batch))
            yield

    def _forget(self) -> None:
        self._encoded, self._encoder_batch = self._nothing, None

    def _at(self, batch: ForwardBatch, *, encodes: bool) -> Any:
        def give(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            running = self._encoder_batch if encodes else batch
            assert running is not None  # encode sets it before the encoder runs
            return args, {**kwargs, "position_ids": running.positions}

        return give

    def encode(self, step: EncoderStep) -> None:
        """Run the encoder over the inputs of new requests; ``inputs`` hands what it makes to the decoder."""
        self._encoder_batch = step.batch
        given: list[Tensor] = [one.features for one in step.inputs if one.features is not None]
        if given:
            inputs = torch.stack(given)
        else:
            tokens = [token for one in step.inputs for token in one.tokens]
            inputs = torch.tensor([tokens], device=self._nothing.device)
        hidden: Tensor = self._encoder(**{self._encoder.main_input_name: inputs}).last_hidden_state
        self._encoded = hidden.flatten(0, 1).unsqueeze(0)

    def inputs(self, step: StepInputs) -> dict[str, Any]:
        """Return the decoder's arguments: with the encoder's new rows, or told that its keys are cached."""
        given: dict[str, Any] = {
            "decoder_input_ids": step.input_ids.unsqueeze(0),
            "encoder_outputs": (self._encoded,),
            "use_cache": step.encoder is None,
        }
        return given if step.encoder is not None else given | {self._cache_name: self._cache}

    def attend(
        self, module: nn.Module, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """Return a module's attention: the encoder's own over its rows, the decoder's from the pool.

        Cross attention brings the rows of new requests, which are stored once, or none: then all are in the pool.
        """
        if layer.attn_type is AttentionType.ENCODER_ONLY:
            assert self._encoder_batch is not None  # the encoder runs in encode alone
            batch = self._encoder_batch
        out: Tensor
        if layer.is_cross_attention and not k.shape[0]:
            out = layer(q, None, None, batch, save_kv_cache=False).out
        else:
            out = layer(q, k, v, batch).out
        return out


class EncoderDecoderAdapter(Adapter):
    """Models of BART's kind: ``self_attn`` in both stacks, ``encoder_attn`` in the decoder's, learned positions."""

    kinds = frozenset({Kind.SOFTMAX})

    def make_pool(self, spec: ModelSpec, sizes: PoolSizes) -> KVPool:
        """Return a pool for the decoder's own keys and one in the encoder's space, behind one."""

        def pool(space: KVSpace, pages: int) -> MHAKVPool:
            crossing = space is KVSpace.ENCODER
            return MHAKVPool(
                [layer for layer in spec.layers if layer.is_cross_attention is crossing],
                num_pages=pages,
                page_size=sizes.page_size,
                dtype=sizes.dtype,
                device=sizes.device,
                space=space,
                layout=sizes.layout,
            )

        return SpacedKVPool([pool(KVSpace.FULL, sizes.num_pages), pool(KVSpace.ENCODER, sizes.num_encoder_pages)])

    def make_layers(self, model: PreTrainedModel, spec: ModelSpec) -> dict[nn.Module, AttentionLayer]:
        """Pair the modules with the layers in the numbering of ``encoders.encoder_decoder_layers``."""
        decoder, encoder = _layers_of(model.get_decoder()), _layers_of(model.get_encoder())
        modules = [
            *(getattr(one, "self_attn", None) for one in decoder),
            *(getattr(one, "encoder_attn", None) for one in decoder),
            *(getattr(one, "self_attn", None) for one in encoder),
        ]
        found = {index: module for index, module in enumerate(modules) if isinstance(module, nn.Module)}
        return pair_layers(model, spec, found, compare_scaling=False)

    def make_bridge(
        self,
        model: PreTrainedModel,
        layers: Mapping[nn.Module, AttentionLayer],
        serving: Serving,
        sizes: EngineSizes,
    ) -> Bridge:
        return EncoderDecoderBridge(model, layers)


class WhisperAdapter(EncoderDecoderAdapter):
    """Whisper: features of a fixed length go into the encoder."""

    def feature_shape(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Return (mel bins, frames) of one input; two convolutions make rows of frames."""
        encoder: Any = model.get_encoder()
        frames = encoder.config.max_source_positions * encoder.conv1.stride[0] * encoder.conv2.stride[0]
        return encoder.config.num_mel_bins, frames


def _layers_of(part: Any) -> list[nn.Module]:
    return list(getattr(part, "layers", ()))


def _positions_of(name: str, part: Any) -> nn.Module:
    module = getattr(part, "embed_positions", None)
    if not isinstance(module, nn.Module) or "position_ids" not in inspect.signature(module.forward).parameters:
        raise UnsupportedModel(
            f"the {name} of {type(part).__name__} has no embed_positions that takes position_ids",
            remedy="write an adapter for its positions (see docs/models.md)",
        )
    return module
