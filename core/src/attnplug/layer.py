"""The attention layer that a model holds: it knows heads and semantics, and no backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .context import get_attn_backend
from .layer_op import number_layer, traced_attention
from .model_spec import LayerGroup, LayerSpec
from .modes import AttentionType
from .spec import Kind

if TYPE_CHECKING:
    from .attention_io import AttentionExtras, AttentionOutput
    from .batch import ForwardBatch


def _scale(value: float | Tensor | None) -> float:
    return 1.0 if value is None else float(value)


class AttentionLayer(nn.Module):
    """One layer of attention, served by the backend of the current ``ForwardContext``.

    scores = (q·k)·scaling; then the soft cap ``cap·tanh(s/cap)``; then masks; then sinks join the softmax's
    denominator only.

    Args:
        num_heads: Query heads of this rank, Hq.
        head_dim: Width of a query and key head, D; for MLA the expanded width.
        scaling: Factor on q·k.
        num_kv_heads: KV heads, Hk; divides Hq.
        layer_id: Names the layer's buffers and its place in the ModelSpec.
        v_head_dim: Width of a value head, Dv; -1 means head_dim.
        logit_cap: Soft cap; 0 means none.
        logit_capping_method: 'tanh', the only one in the contract.
        sliding_window_size: -1 means none; w lets a query at p see keys p-w … p, w+1 of them. A model's "window W" is
            w = W-1.
        is_cross_attention: Reads the encoder's KV space, without causality.
        attn_type: Which keys are visible before windows and masks.
        sinks: A logit a query head, [Hq]; kept as given, float32 recommended.
        k_scale: The pool holds ``k / k_scale``; read once, at construction.
        v_scale: The pool holds ``v / v_scale``.
        kind: Family of attention.
        kv_lora_rank: MLA's latent width, C.
        qk_rope_head_dim: MLA's rope width, R.
        linear_family: Family of a linear layer, such as 'gdn'.
    """

    sinks: Tensor | None
    group: LayerGroup
    """Which layers it shares a plan with; made once, so that a layer's call looks metadata up by it."""
    number: int
    """By which compiled code of this process finds it."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scaling: float,
        num_kv_heads: int,
        layer_id: int,
        *,
        v_head_dim: int = -1,
        logit_cap: float = 0.0,
        logit_capping_method: str = "tanh",
        sliding_window_size: int = -1,
        is_cross_attention: bool = False,
        attn_type: AttentionType = AttentionType.DECODER,
        sinks: Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        kind: Kind = Kind.SOFTMAX,
        kv_lora_rank: int = 0,
        qk_rope_head_dim: int = 0,
        linear_family: str = "",
    ) -> None:
        super().__init__()
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_heads {num_heads} must be a multiple of num_kv_heads {num_kv_heads}")
        if logit_capping_method != "tanh":
            raise ValueError(f"logit_capping_method {logit_capping_method!r} is not in the contract; allowed: 'tanh'")
        if sinks is not None and tuple(sinks.shape) != (num_heads,):
            raise ValueError(f"sinks have shape {tuple(sinks.shape)}; allowed: ({num_heads},), a logit a query head")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.v_head_dim = head_dim, v_head_dim if v_head_dim > 0 else head_dim
        self.scaling, self.layer_id = scaling, layer_id
        self.logit_cap, self.sliding_window_size = float(logit_cap), max(int(sliding_window_size), -1)
        self.is_cross_attention, self.attn_type, self.kind = is_cross_attention, attn_type, kind
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim
        self.k_scale, self.v_scale = _scale(k_scale), _scale(v_scale)
        self.linear_family = linear_family
        self.register_buffer("sinks", sinks, persistent=False)
        self.group = self.spec.group
        self.number = number_layer(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy or an unpickled layer is a layer of its own to compiled code.
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.number = number_layer(self)

    @classmethod
    def from_spec(
        cls, spec: LayerSpec, *, sinks: Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0
    ) -> AttentionLayer:
        """Make the layer that a ModelSpec describes; the sinks' values and scales are the weights' to give."""
        return cls(
            spec.num_heads,
            spec.head_dim,
            spec.scaling,
            spec.num_kv_heads,
            spec.layer_id,
            v_head_dim=spec.v_head_dim,
            logit_cap=spec.logit_cap,
            sliding_window_size=spec.sliding_window_size,
            is_cross_attention=spec.is_cross_attention,
            attn_type=spec.attn_type,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            kind=spec.kind,
            kv_lora_rank=spec.kv_lora_rank,
            qk_rope_head_dim=spec.qk_rope_head_dim,
            linear_family=spec.linear_family,
        )

    @property
    def spec(self) -> LayerSpec:
        """What this layer asks of a backend, as plain data."""
        return LayerSpec(
            layer_id=self.layer_id,
            kind=self.kind,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            scaling=self.scaling,
            sliding_window_size=self.sliding_window_size,
            logit_cap=self.logit_cap,
            has_sinks=self.sinks is not None,
            has_kv_scales=self.k_scale != 1.0 or self.v_scale != 1.0,
            attn_type=self.attn_type,
            is_cross_attention=self.is_cross_attention,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            linear_family=self.linear_family,
        )

    @property
    def causal(self) -> bool:
        """Whether a query's position bounds the keys it sees."""
        return self.attn_type is AttentionType.DECODER and not self.is_cross_attention

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        extras: AttentionExtras | None = None,
    ) -> AttentionOutput:
        """Attend; see ``AttentionBackend.forward`` for shapes.

        Raises:
            ContractViolation: No ``forward_context`` is active.
        """
        if torch.compiler.is_dynamo_compiling():
            return traced_attention(self, q, k, v, save_kv_cache, extras)
        return get_attn_backend().forward(q, k, v, self, batch, save_kv_cache, extras)

    def extra_repr(self) -> str:
        return f"layer_id={self.layer_id}, heads={self.num_heads}/{self.num_kv_heads}, dim={self.head_dim}"


def output_dtype(q: Tensor, v: Tensor | None) -> torch.dtype:
    """Return the dtype of an attention output: the model's; fp8 queries or values give bfloat16."""
    source = q if v is None else v
    return torch.bfloat16 if source.dtype.itemsize == 1 else source.dtype
