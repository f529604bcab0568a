"""Latent attention: rows of C + R columns in the pool, expanded or absorbed as the step and the backend's spec want it.

transformers expands latents into heads before it asks the ``AttentionInterface``, in a method of the module,
``expand_kv(latent, rotated_key)``. For the length of a step that method hands both through as they are, so everything
else, projections, norms, rotation and whatever a family adds to them, stays the model's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnplug.attention_io import AttentionExtras, AttentionOutput
from attnplug.batch import ForwardBatch
from attnplug.errors import UnsupportedModel
from attnplug.kv.pools import KVPool, MLAKVPool
from attnplug.kv.quant import dequantize
from attnplug.layer import AttentionLayer
from attnplug.merge import AttentionState, merge_state
from attnplug.model_spec import ModelSpec
from attnplug.modes import ForwardMode, MlaForm
from attnplug.spec import Kind

from .base import Adapter, Bridge, PoolSizes
from .decoder import InterfaceBridge
from .mla_plan import LatentForms, LatentPlan, PrefixChunk, plan_chunks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..backends import Serving
    from ..sizes import EngineSizes

__all__ = ["LatentBridge", "MlaAdapter"]


class LatentBridge(InterfaceBridge):
    """Serves MLA modules. The two halves of ``kv_b_proj`` are read as views: no weight is copied.

    Args:
        model: Whose attention is served.
        layers: The layer of each of its attention modules.
        serving: Backend and pool.
        max_chunk_tokens: Most rows of cached prefix that are expanded at once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Mapping[nn.Module, AttentionLayer],
        serving: Serving,
        max_chunk_tokens: int,
    ) -> None:
        super().__init__(model, layers)
        ids = [layer.layer_id for layer in layers.values()]
        self._forms = LatentForms(
            next(iter(layers.values())).spec,
            {serving.backend.unwrap(one, ForwardMode.EXTEND).spec for one in ids},
            {serving.backend.unwrap(one, ForwardMode.DECODE).spec for one in ids},
        )
        self.mixes = not self._forms.expands_prompts
        self._pool, self._translator, self._max_chunk_tokens = serving.pool, serving.translator, max_chunk_tokens
        self._plan = LatentPlan(MlaForm.ABSORBED)

    @contextmanager
    def serve(self, batch: ForwardBatch) -> Iterator[None]:
        form = self._forms.choose(batch)
        expands = form is MlaForm.ONE_SHOT
        chunks = plan_chunks(batch, self._translator, self._max_chunk_tokens) if expands else ()
        with super().serve(batch), self._lent():
            self._plan = LatentPlan(form, chunks)
            yield

    @contextmanager
    def _lent(self) -> Iterator[None]:
        # An instance's attribute hides its class's method, which shows again when it is gone.
        own = [(vars(module), vars(module).get("expand_kv")) for module in self.layers]
        try:
            for attributes, _ in own:
                attributes["expand_kv"] = _hand_through
            yield
        finally:
            for attributes, before in own:
                del attributes["expand_kv"]
                if before is not None:
                    attributes["expand_kv"] = before

    def attend(
        self, module: nn.Module, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """Return a module's attention.

        Args:
            module: Who asks.
            layer: Its layer.
            q: [T, Hq, nope + R], rotated.
            k: [T, 1, C]: the new latent rows.
            v: [T, 1, R]: the new rotated key rows.
            batch: The step.

        Returns:
            [T, Hq, Dv], the model's dtype.
        """
        latent, rope = k.squeeze(1), v.squeeze(1)
        if self._plan.form is MlaForm.ABSORBED:
            return _absorbed(module, layer, q, latent, rope, batch)
        return self._expanded(module, layer, q, latent, rope, batch)

    def _expanded(
        self, module: nn.Module, layer: AttentionLayer, q: Tensor, latent: Tensor, rope: Tensor, batch: ForwardBatch
    ) -> Tensor:
        chunks = self._plan.chunks
        keys, values = _expand(module, layer, latent, rope)
        own = AttentionExtras(mla_form=MlaForm.ONE_SHOT, return_lse=bool(chunks), latent=latent, k_rope=rope)
        new: AttentionOutput = layer(q, keys, values, batch, extras=own)
        if not chunks:
            return new.out
        assert new.lse is not None  # asked for
        # Merged in float32, so that a chunk more is not a rounding more.
        state = AttentionState(new.out.float(), new.lse)
        for chunk in chunks:
            part = self._prefix(module, layer, q, chunk, batch)
            state = merge_state(state.out, state.lse, part.out, part.lse)
        return state.out.to(new.out.dtype)

    def _prefix(
        self, module: nn.Module, layer: AttentionLayer, q: Tensor, chunk: PrefixChunk, batch: ForwardBatch
    ) -> AttentionState:
        """Attend to one chunk of the prefixes: every row of it is before every query of its request."""
        stored, _ = self._pool.get_kv_buffer(layer.layer_id)
        # fp8 has no gather on every device; its bytes do.
        source = stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored
        rows = source[chunk.slots].view(stored.dtype).squeeze(1)
        rows, width = dequantize(rows, layer.k_scale, q.dtype), layer.kv_lora_rank
        keys, values = _expand(module, layer, rows[:, :width], rows[:, width:])
        extras = AttentionExtras(
            mla_form=MlaForm.CHUNKED_PREFIX,
            return_lse=True,
            chunk_indptr=chunk.indptr,
            chunk_lens_cpu=chunk.lens_cpu,
        )
        part: AttentionOutput = layer(q, keys, values, batch, save_kv_cache=False, extras=extras)
        assert part.lse is not None  # asked for
        return AttentionState(part.out, part.lse)


class MlaAdapter(Adapter):
    """Decoders whose every layer is MLA, over one pool of latent rows."""

    kinds = frozenset({Kind.MLA})

    def make_pool(self, spec: ModelSpec, sizes: PoolSizes) -> KVPool:
        return MLAKVPool(
            spec.layers,
            num_pages=sizes.num_pages,
            page_size=sizes.page_size,
            dtype=sizes.dtype,
            device=sizes.device,
        )

    def make_layers(self, model: PreTrainedModel, spec: ModelSpec) -> dict[nn.Module, AttentionLayer]:
        layers = super().make_layers(model, spec)
        faults = [fault for module, layer in layers.items() for fault in _faults(module, layer)]
        if faults:
            raise UnsupportedModel(
                f"the latent attention of {type(model).__name__} cannot be bridged:\n  " + "\n  ".join(faults[:8]),
                remedy="load it unquantised and without adapters, with a transformers whose MLA modules expand keys "
                "and values in a method of their own (5.17 has it)",
            )
        return layers

    def make_bridge(
        self,
        model: PreTrainedModel,
        layers: Mapping[nn.Module, AttentionLayer],
        serving: Serving,
        sizes: EngineSizes,
    ) -> Bridge:
        # An expanded chunk is no larger than the activations of the largest step.
        return LatentBridge(model, layers, serving, sizes.max_num_tokens)


def _hand_through(latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """Stand in for ``expand_kv``: latent [1, 1, T, C] and rotated keys [1, 1, T, R], as they are."""
    return latent, rope


def _faults(module: nn.Module, layer: AttentionLayer) -> Iterator[str]:
    at, name = f"layer {layer.layer_id}", type(module).__name__
    if not callable(getattr(module, "expand_kv", None)):
        yield f"{at}: {name} has no method expand_kv(latent, rotated_key)"
    projection: Any = getattr(module, "kv_b_proj", None)
    if type(projection) is not nn.Linear or getattr(projection, "bias", None) is not None:
        bias = " with a bias" if getattr(projection, "bias", None) is not None else ""
        yield f"{at}: {name}.kv_b_proj is a {type(projection).__name__}{bias}; allowed: an nn.Linear without one"
        return
    rows = layer.num_heads * (layer.head_dim - layer.qk_rope_head_dim + layer.v_head_dim)
    if tuple(projection.weight.shape) != (rows, layer.kv_lora_rank):
        yield f"{at}: kv_b_proj is {tuple(projection.weight.shape)}, by its ModelSpec {(rows, layer.kv_lora_rank)}"


def _expand(module: Any, layer: AttentionLayer, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """Return the heads of latent rows: keys [n, Hq, nope + R] and values [n, Hq, Dv].

    Args:
        module: Whose ``kv_b_proj`` expands.
        layer: Its layer.
        latent: [n, C].
        rope: [n, R], shared by all heads.
    """
    nope = layer.head_dim - layer.qk_rope_head_dim
    heads = module.kv_b_proj(latent).view(latent.shape[0], layer.num_heads, nope + layer.v_head_dim)
    shared = rope.unsqueeze(1).expand(-1, layer.num_heads, -1)
    return torch.cat([heads[..., :nope], shared], dim=-1), heads[..., nope:]


def _absorbed(
    module: Any, layer: AttentionLayer, q: Tensor, latent: Tensor, rope: Tensor, batch: ForwardBatch
) -> Tensor:
    """Attend in the latent space: q·(W_UK c) is (W_UKᵀ q)·c, and W_UV is applied once to the result."""
    nope = layer.head_dim - layer.qk_rope_head_dim
    weight = module.kv_b_proj.weight.view(layer.num_heads, nope + layer.v_head_dim, layer.kv_lora_rank)
    q_latent = torch.bmm(q[..., :nope].transpose(0, 1), weight[:, :nope]).transpose(0, 1)
    extras = AttentionExtras(
        mla_form=MlaForm.ABSORBED, q_nope=q_latent, q_rope=q[..., nope:], latent=latent, k_rope=rope
    )
    out = layer(q, None, None, batch, extras=extras).out
    return torch.bmm(out.transpose(0, 1), weight[:, nope:].transpose(1, 2)).transpose(0, 1)
