"""Compiling tiles from a batch: what is read, from where, by which queries."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from attnplug.batch import ForwardBatch
from attnplug.graphs.metadata_buffers import FreshBuffers
from attnplug.kv.pools import KVPool
from attnplug.kv.translator import KVIndexTranslator
from attnplug.modes import KVSpace

from .kernels.mask import Visibility
from .lanes import Lane, find_runs, group_lanes, query_rows
from .metadata import ReadKey, StepMetadata, Tile
from .options import TorchNativeOptions
from .padded import SMALL_MASK, PaddedRead, read_range
from .tree import TreeCells


def start_step(batch: ForwardBatch) -> StepMetadata:
    """Return a step without tiles: the queries of each request that is not padding; of each, where a graph is made."""
    lens = batch.query_lens_cpu
    # What is padding in a capture may be a request in a replay.
    padding = 0 if batch.uses_graph_buffers else batch.num_padding
    starts = tuple(accumulate(lens, initial=0))[: batch.batch_size]
    return StepMetadata(lens[: batch.batch_size - padding] + (0,) * padding, starts)


def plan_pool(
    batch: ForwardBatch,
    step: StepMetadata,
    key: ReadKey,
    pool: KVPool,
    translator: KVIndexTranslator,
    tree: TreeCells | None,
    options: TorchNativeOptions,
) -> tuple[Tile, ...]:
    """Return the tiles of layers that read a pool.

    Every slot is read from the translator here, so nothing of the scheduler's is read in a forward. Host lengths shape
    the tiles; where they are only upper bounds, or missing, masks come from the device's lengths.
    """
    assert key.space is not None
    assert batch.kv_loc_plan is not None  # the backend refused otherwise
    space, device = key.space, batch.device
    lens_cpu = batch.kv_lens_cpu(space)
    exact = lens_cpu is not None and (batch.seq_lens_cpu_exact or space is KVSpace.ENCODER)
    if lens_cpu is None:
        table = translator.read_source(batch.kv_loc_plan, space)
        lens_cpu = (table.ids.shape[1] * table.entry_page_size,) * batch.batch_size
    crossing = space is KVSpace.ENCODER
    start, lens = read_range(batch, key)
    lanes: list[Lane] = []
    packed = 0
    for b, (total, t) in enumerate(zip(lens_cpu, batch.query_lens_cpu, strict=True)):
        # An upper bound shortens a windowed read no further than the window itself: the start is the device's.
        first = max(0, total - t - key.window) if key.window >= 0 and not crossing else 0
        n = total - first
        if not exact and key.window >= 0 and not crossing:
            first, n = 0, min(total, key.window + t)
        if step.query_lens_cpu[b] and n > 0:
            row = step.query_starts_cpu[b]
            lanes.append(Lane(b, row, t, n, total - t - first, first, packed))
        packed += n
    if not exact:
        read = PaddedRead.of(batch, key, translator, tree)
        fresh = FreshBuffers(device)
        return tuple(read.tile(lane.index, 1, lane.row, lane.t, lane.columns, fresh) for lane in lanes)
    indptr = torch.empty(batch.batch_size + 1, dtype=torch.int32, device=device)
    slots = torch.empty(packed, dtype=torch.int64, device=device)
    translator.pack_read_stream(
        batch.kv_loc_plan, seq_lens=lens, indptr=indptr, out=slots, kv_start_idx=start, kind=space
    )
    return _exact_tiles(lanes, key, slots, pool, device, tree, options)


def _exact_tiles(
    lanes: list[Lane],
    key: ReadKey,
    slots: Tensor,
    pool: KVPool,
    device: torch.device,
    tree: TreeCells | None,
    options: TorchNativeOptions,
) -> tuple[Tile, ...]:
    head_major = pool.layout == "HND"
    long = [lane for lane in lanes if not lane.is_short]
    # Looking at slots is free on the host, and a synchronisation elsewhere.
    runs = find_runs(slots, long) if device.type == "cpu" and not head_major else {}
    tiles = []
    for lane in long:
        if lane.index in runs:
            rows = slice(lane.row, lane.row + lane.t)
            rule = Visibility(key.causal, key.window, lane.shift)
            mask = _small_mask(rule, [lane], tree, device)
            tiles.append(
                Tile(rows, 1, lane.t, lane.n, rule, run=runs[lane.index], mask=mask, may_see_nothing=tree is not None)
            )
    rest = [lane for lane in lanes if lane.index not in runs]
    page_size = 1 if head_major else pool.page_size
    for group in group_lanes(rest, page_size, options.max_gather_tokens):
        tiles.append(_gathered_tile(group, key, slots, page_size, device, tree))
    return tuple(tiles)


def _gathered_tile(
    group: list[Lane], key: ReadKey, slots: Tensor, page_size: int, device: torch.device, tree: TreeCells | None
) -> Tile:
    one, n = group[0], group[0].columns
    rows = query_rows(group, device)
    offsets = torch.tensor([lane.offset for lane in group], dtype=torch.int64)
    if one.is_short:
        ends = torch.tensor([lane.n for lane in group], dtype=torch.int64)
        shifts = torch.tensor([lane.shift for lane in group], dtype=torch.int64).to(device, non_blocking=True)
        # Padding columns repeat the request's own last slot: finite wherever the request's keys are, and masked.
        columns = torch.minimum(torch.arange(n), ends[:, None] - 1) + offsets[:, None]
        rule = Visibility(key.causal, key.window, shifts, ends.to(device, non_blocking=True))
        mine = slots[columns.flatten().to(device, non_blocking=True)]
        mask = _small_mask(rule, group, tree, device)
        return Tile(rows, len(group), one.t, n, rule, slots=mine, mask=mask, may_see_nothing=tree is not None)
    rule = Visibility(key.causal, key.window, one.shift)
    mask = _small_mask(rule, group, tree, device)
    if page_size > 1:
        offset = one.start % page_size
        # Column 0 lies in the first page, and each later page begins at a multiple of its size.
        heads = torch.arange(-offset, n, page_size).clamp_min(0)
        at = (offsets[:, None] + heads).flatten().to(device, non_blocking=True)
        pages = torch.div(slots[at], page_size, rounding_mode="floor")
        return Tile(
            rows,
            len(group),
            one.t,
            n,
            rule,
            pages=pages,
            page_offset=offset,
            mask=mask,
            may_see_nothing=tree is not None,
        )
    at = (offsets[:, None] + torch.arange(n)).flatten().to(device, non_blocking=True)
    mine = slots[one.offset : one.offset + n] if len(group) == 1 else slots[at]
    return Tile(rows, len(group), one.t, n, rule, slots=mine, mask=mask, may_see_nothing=tree is not None)


def _small_mask(rule: Visibility, group: list[Lane], tree: TreeCells | None, device: torch.device) -> Tensor | None:
    one = group[0]
    if tree is not None:
        lanes = torch.tensor([lane.index for lane in group], dtype=torch.int64).to(device, non_blocking=True)
        return tree.mask(lanes, one.columns)
    if len(group) * one.t * one.columns > SMALL_MASK:
        return None
    return rule.mask((0, one.t), (0, one.columns), device)


def plan_rows(step: StepMetadata, key: ReadKey) -> tuple[Tile, ...]:
    """Return the tiles of layers that read the rows of the batch itself, a request each."""
    rule = Visibility(key.causal, key.window, 0)
    return tuple(
        Tile(slice(row, row + t), 1, t, t, rule, run=row)
        for row, t in zip(step.query_starts_cpu, step.query_lens_cpu, strict=True)
        if t
    )


def plan_chunk(step: StepMetadata, chunk_lens: tuple[int, ...]) -> tuple[Tile, ...]:
    """Return the tiles of queries over one gathered chunk of their prefix, a request each; nothing is hidden."""
    rule, first = Visibility(False, -1, 0), accumulate(chunk_lens, initial=0)
    return tuple(
        Tile(slice(row, row + t), 1, t, n, rule, run=at)
        for row, t, n, at in zip(step.query_starts_cpu, step.query_lens_cpu, chunk_lens, first, strict=False)
        if t and n
    )
