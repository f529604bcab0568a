"""Tiles whose lengths only the device knows: fixed columns, masked. One builder for upper bounds and for graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug.batch import ForwardBatch
from attnplug.errors import BackendRejected, Reason
from attnplug.graphs.metadata_buffers import BufferSet, BufferSpec
from attnplug.kv.plan import KVIndexTable
from attnplug.kv.translator import KVIndexTranslator
from attnplug.modes import KVSpace

from .kernels.mask import Visibility
from .metadata import ReadKey, Tile
from .tree import TreeCells

SMALL_MASK = 1 << 20
"""Cells up to which a tile's mask is made once a step; a larger one is made block by block, in each layer."""


def read_range(batch: ForwardBatch, key: ReadKey) -> tuple[Tensor, Tensor]:
    """Return the first position that is read, and how many, of each request: two [B] int64, device."""
    assert key.space is not None
    crossing = key.space is KVSpace.ENCODER
    start = torch.zeros_like(batch.seq_lens) if crossing else batch.kv_start_idx(key.window)
    return start, batch.kv_lens(key.space) - start


def buffer_specs(max_bs: int, max_num_tokens: int, n: int) -> dict[str, BufferSpec]:
    """Return what a graph reserves for one way of reading ``n`` columns."""
    return {
        "slots": BufferSpec((max_bs, n), torch.int64),
        "lens": BufferSpec((max_bs,), torch.int64, fill=1),
        "shifts": BufferSpec((max_bs,), torch.int64),
        "mask": BufferSpec((max_num_tokens, n), torch.bool, fill=1),
    }


@dataclass(frozen=True, slots=True)
class PaddedRead:
    """A step's read of one way, by device numbers alone: making a tile of it synchronises with nothing."""

    key: ReadKey
    start: Tensor
    """[B] int64, device: position of column 0."""
    lens: Tensor
    """[B] int64, device: columns that are keys."""
    shifts: Tensor
    """[B] int64, device: column of the first query."""
    table: KVIndexTable
    tree: TreeCells | None

    @classmethod
    def of(cls, batch: ForwardBatch, key: ReadKey, translator: KVIndexTranslator, tree: TreeCells | None) -> PaddedRead:
        """Return the read of a step."""
        assert key.space is not None
        assert batch.kv_loc_plan is not None  # the backend refused otherwise
        start, lens = read_range(batch, key)
        shifts = batch.kv_lens() - batch.query_lens() - start
        return cls(key, start, lens, shifts, translator.read_source(batch.kv_loc_plan, key.space), tree)

    def tile(
        self, first: int, count: int, row: int, t: int, n: int, buffers: BufferSet, *, fixed: bool = False
    ) -> Tile:
        """Return one tile of requests ``first … first + count``.

        Args:
            first: Place of its first request in the batch.
            count: Requests.
            row: Its first query row.
            t: Queries of each request.
            n: Columns; at least as many as each request has keys.
            buffers: Where it is written.
            fixed: Keep every tensor in ``buffers``, which hold the whole batch; else they hold this tile alone.
        """
        mine = slice(first, first + count)
        stop, at = (first + count, mine) if fixed else (count, slice(0, count))
        slots = buffers.take("slots", (stop, n), torch.int64)[at]
        lens = buffers.take("lens", (stop,), torch.int64)[at].copy_(self.lens[mine])
        shifts = buffers.take("shifts", (stop,), torch.int64)[at].copy_(self.shifts[mine])
        slots.copy_(self._slots(mine, n))
        rule = Visibility(self.key.causal, self.key.window, shifts, lens)
        mask = None
        if fixed or self.tree is not None or count * t * n <= SMALL_MASK:
            whole = buffers.take("mask", (stop * t, n), torch.bool)
            mask = whole[at.start * t : at.stop * t].view(count, t, n)
            if self.tree is not None:
                requests = torch.arange(first, first + count, device=slots.device)
                mask = self.tree.mask(requests, n, mask)
            else:
                cells = rule.mask((0, t), (0, n), slots.device)
                assert cells is not None  # key_lens are given
                mask.copy_(cells)
        rows = slice(row, row + count * t)
        return Tile(rows, count, t, n, rule, slots=slots.flatten(), mask=mask, may_see_nothing=True)

    def _slots(self, mine: slice, n: int) -> Tensor:
        column = torch.arange(n, device=self.lens.device)
        inside = column < self.lens[mine, None]
        position = torch.where(inside, column + self.start[mine, None], torch.zeros_like(column))
        size = self.table.entry_page_size
        ids = self.table.ids[self.table.row_ids[mine, None], torch.div(position, size, rounding_mode="floor")]
        slots = ids.to(torch.int64)
        if size > 1:
            slots = slots * size + torch.remainder(position, size)
        # Slot 0 is the sink's, always in range; what it holds is cleared after the gather.
        return torch.where(inside, slots, torch.zeros_like(slots))


def fixed_tiles(read: PaddedRead, batch: ForwardBatch, n: int, buffers: BufferSet, max_tokens: int) -> tuple[Tile, ...]:
    """Return the tiles of a graph's step, every request one width: a few requests a call, by ``max_tokens`` columns.

    Raises:
        BackendRejected: The encoder may be longer than the graph's columns.
    """
    if read.key.space is KVSpace.ENCODER:
        room = read.table.ids.shape[1] * read.table.entry_page_size
        longest = max(batch.encoder_lens_cpu, default=0) if batch.encoder_lens_cpu is not None else room
        if longest > n:
            raise BackendRejected(
                "backend 'torch_native' cannot serve this batch from a graph",
                reasons={"torch_native": [Reason("encoder_lens", f"up to {longest}", f"at most {n}, the context")]},
                remedy="give encoder_lens_cpu, raise max_context_len, or run the step eagerly",
            )
    t, each = batch.num_tokens // max(batch.batch_size, 1), max(1, max_tokens // n)
    spans = [(b, min(each, batch.batch_size - b)) for b in range(0, batch.batch_size, each)]
    return tuple(read.tile(b, count, b * t, t, n, buffers, fixed=True) for b, count in spans)
