"""How large an engine is: batch, tokens, context and pool, from what was asked and what the machine has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from attnplug.assembly.env import Limits
from attnplug.errors import ConfigError
from attnplug.model_spec import LayerSpec, ModelSpec
from attnplug.spec import Kind

__all__ = ["EngineSizes", "choose_sizes"]

_CPU_POOL_BYTES = 2 << 30
_CUDA_FREE_SHARE = 0.8
"""Of the memory that is free after the weights: the rest is for activations and workspaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """The engine's maxima."""

    max_batch_size: int
    max_num_tokens: int
    """Tokens of a step."""
    chunk_size: int
    """Prompt tokens of a step."""
    max_context_len: int
    page_size: int
    num_pages: int
    max_encoder_len: int = 0
    """Rows of one input of an encoder whose keys a decoder reads; 0 where there is none."""
    num_encoder_pages: int = 0
    """Of the encoder space."""

    @property
    def max_encoder_rows(self) -> int:
        """Encoder rows of a step: at least one input's."""
        return max(self.max_num_tokens, self.max_encoder_len) if self.max_encoder_len else 0

    @property
    def limits(self) -> Limits:
        """What backends size their buffers by."""
        return Limits(
            max_batch_size=self.max_batch_size,
            max_num_tokens=max(self.max_num_tokens, self.max_encoder_rows),
            max_context_len=max(self.max_context_len, self.max_encoder_len),
        )


def choose_sizes(
    spec: ModelSpec,
    *,
    page_size: int,
    kv_dtype: torch.dtype,
    device: torch.device,
    max_batch_size: int,
    max_num_tokens: int,
    chunk_size: int | None,
    max_context_len: int | None,
    num_pages: int | None,
    kv_cache_bytes: int | None,
    max_encoder_len: int = 0,
    num_encoder_pages: int | None = None,
) -> EngineSizes:
    """Check the sizes asked for and choose the others; bytes are shared out between spaces by what all requests need.

    Raises:
        ConfigError: Naming every size that cannot be.
    """
    context = spec.max_context_len if max_context_len is None else max_context_len
    chunk = max_num_tokens if chunk_size is None else chunk_size
    asked = {
        "max_batch_size": max_batch_size,
        "max_num_tokens": max_num_tokens,
        "chunk_size": chunk,
        "max_context_len": context,
        "num_pages": 1 if num_pages is None else num_pages,
        "num_encoder_pages": 1 if num_encoder_pages is None else num_encoder_pages,
    }
    faults = [f"{name} is {value!r}; allowed: a whole number" for name, value in asked.items() if not _is_whole(value)]
    if faults:  # The others are made of these.
        raise ConfigError("; ".join(faults), key="engine", remedy="correct the Engine's arguments")
    faults = [f"{name} is {value}; allowed: at least 1" for name, value in asked.items() if value < 1]
    if context > spec.max_context_len:
        faults.append(f"max_context_len is {context}; allowed: at most the model's {spec.max_context_len}")
    if max_num_tokens < max_batch_size:
        faults.append(f"max_num_tokens is {max_num_tokens}; allowed: at least max_batch_size, {max_batch_size}")
    if num_pages is not None and kv_cache_bytes is not None:
        faults.append("num_pages and kv_cache_bytes are both given; allowed: one of them")
    if num_encoder_pages is not None and not max_encoder_len:
        faults.append(f"num_encoder_pages is {num_encoder_pages}, and this model's decoder reads no encoder")
    spaces = [_Space.of(spec, page_size, kv_dtype, max_batch_size * -(-context // page_size), crossing=False)]
    if max_encoder_len:
        most = max_batch_size * -(-max_encoder_len // page_size)
        spaces.append(_Space.of(spec, page_size, kv_dtype, most, crossing=True))
    if num_pages is None:
        budget = _free_bytes(device) if kv_cache_bytes is None else kv_cache_bytes
        share = min(1.0, budget / max(1, sum(one.nbytes for one in spaces)))
        # One page more is the sink's.
        counts = [min(one.pages, int(share * one.nbytes) // one.page_bytes - 1) for one in spaces]
        num_pages = counts[0]
        num_encoder_pages = counts[-1] if num_encoder_pages is None else num_encoder_pages
        if min(counts) < 1 and not faults:
            least = " and ".join(str(one.page_bytes) for one in spaces)
            faults.append(f"the KV pool may have {budget} bytes; allowed: at least two pages of {least} bytes")
    elif num_encoder_pages is None:
        num_encoder_pages = spaces[-1].pages
    if faults:
        raise ConfigError("; ".join(faults), key="engine", remedy="correct the Engine's arguments")
    return EngineSizes(
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        chunk_size=min(chunk, max_num_tokens),
        max_context_len=context,
        page_size=page_size,
        num_pages=num_pages,
        max_encoder_len=max_encoder_len,
        num_encoder_pages=num_encoder_pages if max_encoder_len else 0,
    )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _Space(NamedTuple):
    """An id space of the pool."""

    page_bytes: int
    pages: int
    """With which every request of a full batch has all it can use."""

    @classmethod
    def of(cls, spec: ModelSpec, page_size: int, dtype: torch.dtype, pages: int, *, crossing: bool) -> _Space:
        layers = [layer for layer in spec.layers if layer.is_cross_attention is crossing]
        return cls(page_size * sum(_bytes_per_token(layer, dtype) for layer in layers), pages)

    @property
    def nbytes(self) -> int:
        return self.page_bytes * (self.pages + 1)


def _bytes_per_token(layer: LayerSpec, dtype: torch.dtype) -> int:
    if not layer.reads_pool:
        return 0
    if layer.kind is Kind.MLA:
        return (layer.kv_lora_rank + layer.qk_rope_head_dim) * dtype.itemsize
    return layer.num_kv_heads * (layer.head_dim + layer.v_head_dim) * dtype.itemsize


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_POOL_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * _CUDA_FREE_SHARE)
