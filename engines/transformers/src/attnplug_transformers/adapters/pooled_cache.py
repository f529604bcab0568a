"""A transformers cache that stores nothing: for a decoder whose keys are all in the pool already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from attnplug.layer import AttentionLayer

__all__ = ["PooledCache"]


class _Stored(NamedTuple):
    """No rows of a layer: what is stored is the pool's."""

    keys: Tensor
    """[1, Hk, 0, D]."""
    values: Tensor
    """[1, Hk, 0, Dv]."""


class _CrossCache:
    def __init__(self, layers: list[_Stored]) -> None:
        self.layers = layers


class _SelfCache(DynamicCache):
    """Hands a step's new rows through; what else a model asks of a cache is an empty one's answer."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class PooledCache(EncoderDecoderCache):
    """Says that the encoder's keys are there, so that a decoder computes none, and gives none.

    Args:
        layers: The cross-attention layers, in the order of the decoder's.
        dtype: The model's.
        device: The model's.
    """

    def __init__(self, layers: Sequence[AttentionLayer], *, dtype: torch.dtype, device: torch.device) -> None:
        # The parent's constructor wants caches that store.
        def empty(heads: int, width: int) -> Tensor:
            return torch.empty(1, heads, 0, width, dtype=dtype, device=device)

        stored = [
            _Stored(empty(one.num_kv_heads, one.head_dim), empty(one.num_kv_heads, one.v_head_dim)) for one in layers
        ]
        self.self_attention_cache: Any = _SelfCache()
        self.cross_attention_cache: Any = _CrossCache(stored)
        self.is_updated = dict.fromkeys(range(len(stored)), True)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are the batch's."""
        return 0
