"""What a model asks of attention, layer by layer: standard library only, made before weights load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .modes import AttentionType
from .spec import Kind


class LayerGroup(NamedTuple):
    """What layers must agree in to share one plan: a backend makes metadata once for each group."""

    kind: Kind
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    sliding_window_size: int
    logit_cap: float
    has_sinks: bool
    is_cross_attention: bool
    attn_type: AttentionType


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One attention layer. Heads are those of this rank, after tensor parallelism."""

    layer_id: int
    kind: Kind = Kind.SOFTMAX
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    """Width of a query and key head; for MLA the expanded width, nope + rope."""
    v_head_dim: int = 0
    scaling: float = 1.0
    sliding_window_size: int = -1
    """-1: none; w: a query at p sees keys p-w … p, that is w+1 keys."""
    logit_cap: float = 0.0
    has_sinks: bool = False
    has_kv_scales: bool = False
    attn_type: AttentionType = AttentionType.DECODER
    is_cross_attention: bool = False
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    linear_family: str = ""

    @property
    def group(self) -> LayerGroup:
        """The group of equal layers that this one belongs to."""
        return LayerGroup(
            self.kind,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.v_head_dim,
            self.sliding_window_size,
            self.logit_cap,
            self.has_sinks,
            self.is_cross_attention,
            self.attn_type,
        )

    @property
    def group_size(self) -> int:
        """Query heads a KV head."""
        return self.num_heads // max(self.num_kv_heads, 1)

    @property
    def reads_pool(self) -> bool:
        """Whether the layer has K and V in a pool at all."""
        return self.kind is not Kind.LINEAR and self.attn_type is not AttentionType.ENCODER_ONLY


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A model as attention sees it."""

    name: str
    layers: tuple[LayerSpec, ...]
    dtype: str
    """torch's name of the activations' dtype, such as 'bfloat16'."""
    max_context_len: int

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The distinct groups, in the order of their first layer."""
        return tuple(dict.fromkeys(layer.group for layer in self.layers))

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset(layer.kind for layer in self.layers)

    def layer(self, layer_id: int) -> LayerSpec:
        """Return the layer of that id; raises KeyError where there is none."""
        for layer in self.layers:
            if layer.layer_id == layer_id:
                return layer
        raise KeyError(f"layer {layer_id} is not in {self.name}: it has {[one.layer_id for one in self.layers]}")

    def subset(self, layer_ids: Sequence[int]) -> ModelSpec:
        """Return the same model with only these layers."""
        keep = set(layer_ids)
        return ModelSpec(
            name=self.name,
            layers=tuple(layer for layer in self.layers if layer.layer_id in keep),
            dtype=self.dtype,
            max_context_len=self.max_context_len,
        )
