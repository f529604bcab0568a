"""A tile's keys and values as dense views: out of a pool by its plan, or out of the batch's own rows."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attnplug.kv.quant import quantize

from .kernels.gather import as_bytes, gather_head_major, gather_pages, gather_slots, view_run
from .metadata import Tile, select_rows
from .workspace import Workspace


class KeysValues(NamedTuple):
    """What a tile attends to."""

    k: Tensor
    """[count, n, Hk, D]."""
    v: Tensor
    """[count, n, Hk, Dv]."""


class Source(Protocol):
    """Where tiles read from."""

    kv_heads: int
    value_width: int
    dtype: torch.dtype

    def read(self, tile: Tile) -> KeysValues:
        """Return a tile's keys and values; valid until the next read."""


class RowSource:
    """Rows of a call's own k and v, such as an encoder's.

    Args:
        k: [rows, Hk, D].
        v: [rows, Hk, Dv].
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self._k, self._v = k, v
        self.kv_heads, self.value_width, self.dtype = k.shape[1], v.shape[2], k.dtype

    def read(self, tile: Tile) -> KeysValues:
        return KeysValues(view_run(self._k, tile.run, tile.n), view_run(self._v, tile.run, tile.n))


class PoolSource:
    """Slots of a pool.

    Args:
        k: Key buffer, NHD [slots, Hk, D] or HND [pages, Hk, page_size, D].
        v: Value buffer likewise.
        head_major: Whether the layout is HND.
        page_size: Slots a page.
        workspace: Holds what is gathered; None in a graph.
        latent_width: MLA: the values are so many first columns of the keys, which are then read once.
        new: This step's own (keys, values), [T, Hk, …], where they are not in the pool and shall not be.
        scales: What ``new`` is divided by, as the pool would do.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        *,
        head_major: bool,
        page_size: int,
        workspace: Workspace | None,
        latent_width: int = 0,
        new: tuple[Tensor, Tensor] | None = None,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self._k, self._v, self._new, self._scales = k, v, new, scales
        self.kv_heads, self.value_width, self.dtype = k.shape[1], v.shape[-1], k.dtype
        self._head_major, self._page_size = head_major, page_size
        self._workspace, self._latent_width = workspace, latent_width

    def read(self, tile: Tile) -> KeysValues:
        k = self._one(self._k, tile, "k", 0)
        v = k[..., : self._latent_width] if self._latent_width else self._one(self._v, tile, "v", 1)
        return KeysValues(k, v)

    def _one(self, buffer: Tensor, tile: Tile, name: str, which: int) -> Tensor:
        if tile.run >= 0:
            found = view_run(buffer, tile.run, tile.n)
            if self._new is not None:
                # The pool's own rows are not ours to change.
                found = found.clone()
        elif tile.pages is not None:
            paged = gather_pages(buffer, tile.pages, tile.count, self._page_size, self._workspace, name)
            found = paged[:, tile.page_offset : tile.page_offset + tile.n]
        else:
            assert tile.slots is not None  # a tile of a pool reads a run, pages or slots
            gather = gather_head_major if self._head_major else gather_slots
            found = gather(buffer, tile.slots, tile.count, self._workspace, name)
        if self._new is not None:
            self._overlay(found, tile, which)
        key_lens = tile.visibility.key_lens
        if key_lens is not None and (tile.may_see_nothing or self._new is not None):
            # A masked weight of 0 times NaN is NaN: what lies beyond a length must be finite.
            beyond = torch.arange(tile.n, device=found.device) >= key_lens[:, None]
            as_bytes(found).masked_fill_(beyond[:, :, None, None], 0)
        return found

    def _overlay(self, found: Tensor, tile: Tile, which: int) -> None:
        assert self._new is not None
        rows = quantize(select_rows(self._new[which], tile.rows), self._scales[which], found.dtype)
        rows = as_bytes(rows.view(tile.count, tile.t, *rows.shape[1:]))
        found = as_bytes(found)
        shift = tile.visibility.shift
        if isinstance(shift, int):
            found[:, shift : shift + tile.t] = rows
            return
        column = (shift[:, None] + torch.arange(tile.t, device=found.device)).clamp(0, tile.n - 1)
        request = torch.arange(tile.count, device=found.device)[:, None]
        found[request, column] = rows
