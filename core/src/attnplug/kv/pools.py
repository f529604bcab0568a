"""KV pools: one buffer a layer, addressed by slot. Page 0 belongs to nobody; slot 0 is the sink of padding rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import BatchError, ConfigError
from ..layer import AttentionLayer
from ..model_spec import LayerSpec
from ..modes import KVSpace
from ..spec import Kind
from .quant import quantize
from .write_loc import KVWriteLoc

MAX_SLOTS = 2**31
"""``req_to_token`` and page tables hold slots in int32."""
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@runtime_checkable
class KVPool(Protocol):
    """What a backend needs of a pool."""

    page_size: int
    num_slots: int
    """Slots of the full space, the sink's page included."""
    sink_slot: int
    dtype: torch.dtype
    layout: str

    def space_of(self, layer_id: int) -> KVSpace:
        """Return the space of a layer's slots."""

    def set_kv_buffer(self, layer: AttentionLayer, loc: KVWriteLoc, k: Tensor, v: Tensor) -> None:
        """Store ``k / k_scale`` and ``v / v_scale`` of a layer at its slots."""

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Return a layer's key and value buffers, as stored."""


def check_loc(loc: KVWriteLoc, space: KVSpace, rows: int, layer_id: int) -> None:
    """Refuse slots of another space or of another number of rows; nothing is written then."""
    problems = []
    if loc.space is not space:
        problems.append(f"layer {layer_id}: slots of the {loc.space.value} space, its pool has {space.value} slots")
    if loc.slots.numel() != rows:
        problems.append(f"layer {layer_id}: {loc.slots.numel()} slots for {rows} rows of keys")
    if problems:
        raise BatchError(problems, remedy="take the slots from KVWriteLoc.for_layer(batch, layer)")


def pool_slots(num_pages: int, page_size: int) -> int:
    """Return the slots of ``num_pages`` usable pages and the sink's page, after checking both numbers."""
    if page_size not in PAGE_SIZES:
        raise ConfigError(
            f"page_size is {page_size}; allowed: {', '.join(map(str, PAGE_SIZES))}",
            key="page_size",
            value=str(page_size),
            allowed=str(PAGE_SIZES),
        )
    if num_pages < 1:
        message = f"num_pages is {num_pages}; allowed: at least 1"
        raise ConfigError(message, key="num_pages", value=str(num_pages), allowed="at least 1")
    slots = (num_pages + 1) * page_size
    if slots > MAX_SLOTS:
        most = MAX_SLOTS // page_size - 1
        raise ConfigError(
            f"num_pages is {num_pages}; allowed: at most {most} of {page_size} tokens, since slots are int32",
            key="num_pages",
            value=str(num_pages),
            allowed=f"at most {most}",
        )
    return slots


class MHAKVPool:
    """Keys and values by head: NHD [slots, Hk, D] or HND [pages, Hk, page_size, D], one pair a layer.

    Args:
        layers: The layers that live here; they may differ in heads and head dimensions.
        num_pages: Usable pages, beside page 0.
        page_size: Tokens a page.
        dtype: Storage dtype; float8_e4m3fn and float8_e5m2 hold ``x / scale``.
        device: Where the buffers are.
        space: The id space of the slots.
        layout: 'NHD' or 'HND'.
    """

    sink_slot = 0

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        space: KVSpace = KVSpace.FULL,
        layout: str = "NHD",
    ) -> None:
        if layout not in ("NHD", "HND"):
            raise ConfigError(f"KV layout {layout!r}", key="kv_layout", value=layout, allowed="NHD, HND")
        self.num_slots = pool_slots(num_pages, page_size)
        self.num_pages, self.page_size = num_pages, page_size
        self.dtype, self.device, self.space, self.layout = dtype, torch.device(device), space, layout
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        for layer in layers:
            if layer.kind not in (Kind.SOFTMAX, Kind.SPARSE) or not layer.reads_pool:
                continue
            self._buffers[layer.layer_id] = (
                self._buffer(layer.num_kv_heads, layer.head_dim),
                self._buffer(layer.num_kv_heads, layer.v_head_dim),
            )

    def _buffer(self, heads: int, dim: int) -> Tensor:
        shape = (
            (self.num_slots, heads, dim)
            if self.layout == "NHD"
            else (self.num_slots // self.page_size, heads, self.page_size, dim)
        )
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers that have buffers here."""
        return tuple(self._buffers)

    def space_of(self, layer_id: int) -> KVSpace:
        return self.space

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Return (keys, values) of a layer, in the pool's layout and dtype; views that later steps overwrite."""
        return self._buffers[layer_id]

    def set_kv_buffer(self, layer: AttentionLayer, loc: KVWriteLoc, k: Tensor, v: Tensor) -> None:
        """Store a step's rows; the caller's tensors are not changed.

        Args:
            layer: Names the buffers and the scales.
            loc: A slot a row, of this pool's space; rows of padding name the sink.
            k: [T, Hk, D] of any float dtype.
            v: [T, Hk, Dv] likewise.

        Raises:
            BatchError: Slots of another space, or of another number of rows.
        """
        check_loc(loc, self.space, k.shape[0], layer.layer_id)
        keys, values = self._buffers[layer.layer_id]
        self._scatter(keys, loc.slots, quantize(k, layer.k_scale, self.dtype))
        self._scatter(values, loc.slots, quantize(v, layer.v_scale, self.dtype))

    def _scatter(self, buffer: Tensor, slots: Tensor, rows: Tensor) -> None:
        # fp8 has no index_put on every device; its bytes do.
        if self.dtype.itemsize == 1:
            buffer, rows = buffer.view(torch.uint8), rows.view(torch.uint8)
        if self.layout == "NHD":
            buffer.index_copy_(0, slots, rows)
        else:
            buffer[slots // self.page_size, :, slots % self.page_size] = rows

    def nbytes(self) -> int:
        """Return the bytes that all buffers hold."""
        return sum(t.nbytes for pair in self._buffers.values() for t in pair)


class MLAKVPool:
    """Latent rows: [slots, C + R], one buffer a layer; the values are the first C columns.

    Args:
        layers: The MLA layers that live here.
        num_pages: Usable pages, beside page 0.
        page_size: Tokens a page.
        dtype: Storage dtype; fp8 holds ``x / k_scale``.
        device: Where the buffers are.
        space: The id space of the slots.
    """

    sink_slot = 0
    layout = "NHD"

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        space: KVSpace = KVSpace.FULL,
    ) -> None:
        self.num_slots = pool_slots(num_pages, page_size)
        self.num_pages, self.page_size = num_pages, page_size
        self.dtype, self.device, self.space = dtype, torch.device(device), space
        self._buffers: dict[int, Tensor] = {}
        self._latent: dict[int, int] = {}
        for layer in layers:
            if layer.kind is Kind.MLA:
                width = layer.kv_lora_rank + layer.qk_rope_head_dim
                self._buffers[layer.layer_id] = torch.zeros((self.num_slots, width), dtype=dtype, device=self.device)
                self._latent[layer.layer_id] = layer.kv_lora_rank

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers that have buffers here."""
        return tuple(self._buffers)

    def space_of(self, layer_id: int) -> KVSpace:
        return self.space

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Return (rows [slots, 1, C + R], latents [slots, 1, C]), two views of one buffer."""
        rows = self._buffers[layer_id].unsqueeze(1)
        return rows, rows[..., : self._latent[layer_id]]

    def set_kv_buffer(self, layer: AttentionLayer, loc: KVWriteLoc, k: Tensor, v: Tensor) -> None:
        """Store latent rows: k is the latent [T, C], v the rope part [T, R]; both are scaled by ``k_scale``."""
        check_loc(loc, self.space, k.shape[0], layer.layer_id)
        buffer = self._buffers[layer.layer_id]
        rows = quantize(torch.cat([k.flatten(1), v.flatten(1)], dim=1), layer.k_scale, self.dtype)
        if self.dtype.itemsize == 1:
            buffer, rows = buffer.view(torch.uint8), rows.view(torch.uint8)
        buffer.index_copy_(0, loc.slots, rows)

    def nbytes(self) -> int:
        """Return the bytes that all buffers hold."""
        return sum(t.nbytes for t in self._buffers.values())


class SpacedKVPool:
    """Pools of several spaces or kinds behind one; a layer lives in exactly one of them.

    Args:
        pools: The parts; the first names page size, sink, dtype and layout, and holds the full space.
    """

    def __init__(self, pools: Sequence[MHAKVPool | MLAKVPool]) -> None:
        first = pools[0]
        self.page_size, self.num_slots, self.sink_slot = first.page_size, first.num_slots, first.sink_slot
        self.dtype, self.layout, self.device = first.dtype, first.layout, first.device
        self.pools = tuple(pools)
        self._by_layer: dict[int, MHAKVPool | MLAKVPool] = {}
        for pool in pools:
            for layer_id in pool.layer_ids:
                if layer_id in self._by_layer:
                    raise ConfigError(f"layer {layer_id} is in two pools", key="pools", value=str(layer_id))
                self._by_layer[layer_id] = pool

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers that have buffers here."""
        return tuple(self._by_layer)

    @property
    def layer_spaces(self) -> Mapping[int, KVSpace]:
        """The space of each layer."""
        return {layer_id: pool.space for layer_id, pool in self._by_layer.items()}

    def space_of(self, layer_id: int) -> KVSpace:
        return self._by_layer[layer_id].space

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self._by_layer[layer_id].get_kv_buffer(layer_id)

    def set_kv_buffer(self, layer: AttentionLayer, loc: KVWriteLoc, k: Tensor, v: Tensor) -> None:
        self._by_layer[layer.layer_id].set_kv_buffer(layer, loc, k, v)

    def nbytes(self) -> int:
        """Return the bytes that all parts hold."""
        return sum(pool.nbytes() for pool in self.pools)
