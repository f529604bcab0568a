"""Parts and paddings of a batch, so that wrappers and graph runners need no look-alikes."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from .batch import ForwardBatch
from .errors import BatchError
from .modes import KVSpace
from .spec_info import SpecInfo


def _starts(lens: tuple[int, ...]) -> list[int]:
    return [0, *accumulate(lens)]


def token_slices(batch: ForwardBatch, start: int, stop: int) -> tuple[slice, slice]:
    """Return which query rows, and which encoder rows, belong to requests ``start … stop``."""
    rows = _starts(batch.query_lens_cpu)
    encoder = _starts(batch.encoder_new_lens_cpu or (0,) * batch.batch_size)
    return slice(rows[start], rows[stop]), slice(encoder[start], encoder[stop])


def slice_batch(batch: ForwardBatch, start: int, stop: int) -> ForwardBatch:
    """Return requests ``start … stop``; see ``ForwardBatch.slice``."""
    if not 0 <= start <= stop <= batch.batch_size:
        raise BatchError([f"slice {start} … {stop} of a batch of {batch.batch_size} requests"])
    requests = slice(start, stop)
    tokens, encoder = token_slices(batch, start, stop)
    mirror = None if batch.seq_lens_cpu is None else batch.seq_lens_cpu[requests]
    exact = batch.seq_lens_cpu_exact and mirror is not None
    extend_lens = None if batch.extend_seq_lens_cpu is None else batch.extend_seq_lens_cpu[requests]
    starts = batch.extend_start_loc
    plan = batch.kv_loc_plan
    return ForwardBatch(
        forward_mode=batch.forward_mode,
        logical_forward_mode=batch.logical_forward_mode,
        uses_graph_buffers=batch.uses_graph_buffers,
        batch_size=stop - start,
        num_padding=max(0, stop - max(start, batch.batch_size - batch.num_padding)),
        req_pool_indices=batch.req_pool_indices[requests],
        seq_lens=batch.seq_lens[requests],
        seq_lens_cpu=mirror,
        # Without a mirror the whole batch's numbers are bounds of the part's.
        seq_lens_cpu_exact=exact,
        seq_lens_sum=batch.seq_lens_sum if mirror is None else int(mirror.sum()),
        max_seq_len=batch.max_seq_len if mirror is None else int(mirror.max()) if mirror.numel() else 0,
        positions=batch.positions[tokens],
        out_cache_loc=batch.out_cache_loc[tokens],
        extend_seq_lens=None if batch.extend_seq_lens is None else batch.extend_seq_lens[requests],
        extend_prefix_lens=None if batch.extend_prefix_lens is None else batch.extend_prefix_lens[requests],
        extend_start_loc=None if starts is None else starts[requests] - tokens.start,
        extend_seq_lens_cpu=extend_lens,
        extend_prefix_lens_cpu=None if batch.extend_prefix_lens_cpu is None else batch.extend_prefix_lens_cpu[requests],
        extend_num_tokens=0 if extend_lens is None else sum(extend_lens),
        encoder_lens=None if batch.encoder_lens is None else batch.encoder_lens[requests],
        encoder_lens_cpu=None if batch.encoder_lens_cpu is None else batch.encoder_lens_cpu[requests],
        encoder_new_lens_cpu=None if batch.encoder_new_lens_cpu is None else batch.encoder_new_lens_cpu[requests],
        encoder_out_cache_loc=None if batch.encoder_out_cache_loc is None else batch.encoder_out_cache_loc[encoder],
        spec_info=None if batch.spec_info is None else batch.spec_info.rows(start, stop, batch.seq_lens),
        kv_loc_plan=None if plan is None else plan.slice(requests, tokens, encoder),
        state=None if batch.state is None else batch.state.rows(requests),
    )


class Padding(NamedTuple):
    """How a batch of uniform query width grows to a size."""

    extra: int
    """Padding requests to add."""
    width: int
    """Queries of each."""
    seq_len: int
    """What ``seq_lens`` holds for each."""


def padding_of(batch: ForwardBatch, batch_size: int, *, seq_len_fill: int) -> Padding:
    """Return how to pad a batch to a size.

    Raises:
        BatchError: The batch is larger, or its query widths differ.
    """
    extra, widths = batch_size - batch.batch_size, set(batch.query_lens_cpu)
    if extra < 0 or len(widths) > 1:
        raise BatchError([f"cannot pad {batch.batch_size} requests with query widths {sorted(widths)} to {batch_size}"])
    # Of no request the width is the draft window's, where there is one.
    width = widths.pop() if widths else (batch.spec_info.draft_token_num if batch.spec_info else 1)
    # Under target-verify seq_lens leaves the window out; elsewhere it holds the padding row's queries too.
    return Padding(extra, width, seq_len_fill if batch.forward_mode.is_target_verify else max(seq_len_fill, width))


def padded_numbers(batch: ForwardBatch, padding: Padding) -> dict[str, Any]:
    """Return a padded batch's host fields, by name."""
    extra, width, fill = padding

    def grow(t: tuple[int, ...] | None, value: int) -> tuple[int, ...] | None:
        return None if t is None else t + (value,) * extra

    mirror = batch.seq_lens_cpu
    return {
        "batch_size": batch.batch_size + extra,
        "num_padding": batch.num_padding + extra,
        "seq_lens_cpu": None if mirror is None else torch.cat([mirror, mirror.new_full((extra,), fill)]),
        "seq_lens_sum": batch.seq_lens_sum + extra * fill,
        "max_seq_len": max(batch.max_seq_len, fill),
        "extend_seq_lens_cpu": grow(batch.extend_seq_lens_cpu, width),
        "extend_prefix_lens_cpu": grow(batch.extend_prefix_lens_cpu, fill - width),
        "extend_num_tokens": batch.extend_num_tokens + extra * width if batch.extend_seq_lens is not None else 0,
        "encoder_lens_cpu": grow(batch.encoder_lens_cpu, 0),
        "encoder_new_lens_cpu": grow(batch.encoder_new_lens_cpu, 0),
    }


def pad_batch(batch: ForwardBatch, batch_size: int, *, seq_len_fill: int, sink_slot: int) -> ForwardBatch:
    """Return the batch with padding requests; see ``ForwardBatch.pad``. Uniform query widths only."""
    if batch_size == batch.batch_size:
        return batch
    padding = padding_of(batch, batch_size, seq_len_fill=seq_len_fill)
    extra, width, fill = padding

    def grow(t: torch.Tensor, count: int, fill: int) -> torch.Tensor:
        return torch.cat([t, torch.full((count,), fill, dtype=t.dtype, device=t.device)])

    def grow_opt(t: torch.Tensor | None, fill: int) -> torch.Tensor | None:
        return None if t is None else grow(t, extra, fill)

    plan = batch.kv_loc_plan
    if plan is not None:
        writes = {
            space: slots if space is KVSpace.ENCODER else grow(slots, extra * width, sink_slot)
            for space, slots in plan.write_slots.items()
        }
        plan = type(plan)(plan.translator_id, grow(plan.req_pool_indices, extra, 0), writes, plan.layer_spaces)
    state = batch.state
    if state is not None:
        state = type(state)(
            slots=grow(state.slots, extra, -1),
            has_initial_state=grow(state.has_initial_state, extra, 0),
            track_slots=grow_opt(state.track_slots, -1),
            track_lens=grow_opt(state.track_lens, 0),
        )
    starts = batch.extend_start_loc
    if starts is not None:
        more = width * torch.arange(extra, dtype=torch.int32, device=batch.device)
        starts = torch.cat([starts, batch.num_tokens + more])
    return batch.replace(
        **padded_numbers(batch, padding),
        req_pool_indices=grow(batch.req_pool_indices, extra, 0),
        seq_lens=grow(batch.seq_lens, extra, fill),
        positions=grow(batch.positions, extra * width, 0),
        out_cache_loc=grow(batch.out_cache_loc, extra * width, sink_slot),
        extend_seq_lens=grow_opt(batch.extend_seq_lens, width),
        extend_prefix_lens=grow_opt(batch.extend_prefix_lens, fill - width),
        extend_start_loc=starts,
        encoder_lens=grow_opt(batch.encoder_lens, 0),
        spec_info=_pad_spec_info(batch, extra, fill),
        kv_loc_plan=plan,
        state=state,
    )


def _pad_spec_info(batch: ForwardBatch, extra: int, seq_len_fill: int) -> SpecInfo | None:
    info = batch.spec_info
    if info is None:
        return None
    parents, accept, lens = info.parents, info.accept_lens, info.mask_seq_lens
    if parents is not None:
        chain = torch.arange(-1, info.draft_token_num - 1, dtype=parents.dtype, device=parents.device)
        parents = torch.cat([parents, chain.expand(extra, -1)])
    if accept is not None:
        accept = torch.cat([accept, accept.new_zeros(extra)])
    if lens is not None:
        # A padding row has cells of its own only past those of the batch that the mask was filled for.
        missing = info.mask_row + batch.batch_size + extra - lens.shape[0]
        lens = torch.cat([lens, lens.new_full((max(0, missing),), seq_len_fill)])
    return replace(info, parents=parents, accept_lens=accept, mask_seq_lens=lens)
