"""How large an engine is: batch, tokens, context and pool, from what was asked and what the machine has."""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def limits(self) -> Limits:
        """What backends size their buffers by."""
        return Limits(
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            max_context_len=self.max_context_len,
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
) -> EngineSizes:
    """Check the sizes asked for and choose the others.

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
    }
    faults = [f"{name} is {value}; allowed: at least 1" for name, value in asked.items() if value < 1]
    if context > spec.max_context_len:
        faults.append(f"max_context_len is {context}; allowed: at most the model's {spec.max_context_len}")
    if max_num_tokens < max_batch_size:
        faults.append(f"max_num_tokens is {max_num_tokens}; allowed: at least max_batch_size, {max_batch_size}")
    if num_pages is not None and kv_cache_bytes is not None:
        faults.append("num_pages and kv_cache_bytes are both given; allowed: one of them")
    page_bytes = page_size * sum(_bytes_per_token(layer, kv_dtype) for layer in spec.layers)
    pages_for_all = max_batch_size * -(-context // page_size)
    if num_pages is None:
        budget = _free_bytes(device) if kv_cache_bytes is None else kv_cache_bytes
        # One page more is the sink's.
        num_pages = min(pages_for_all, budget // page_bytes - 1)
        if num_pages < 1:
            faults.append(f"the KV pool may have {budget} bytes; allowed: at least two pages of {page_bytes} bytes")
    if faults:
        raise ConfigError("; ".join(faults), key="engine", remedy="correct the Engine's arguments")
    return EngineSizes(
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        chunk_size=min(chunk, max_num_tokens),
        max_context_len=context,
        page_size=page_size,
        num_pages=num_pages,
    )


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
