"""A graph's copy of the batch: tensors of fixed address, sized by the maxima, into which each step is loaded."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from ..batch import ForwardBatch, LinearState
from ..batch_parts import Padding, padded_numbers, padding_of
from ..errors import BatchError
from ..kv.plan import KVLocPlan
from ..modes import KVSpace
from ..spec_info import SpecInfo

_T = TypeVar("_T", Tensor, Tensor | None)


class BatchBuffers:
    """Fixed tensors for every device field of a batch.

    Slices share addresses: the batches of all sizes read the same memory. Host numbers are taken from the step.

    Args:
        max_bs: Most requests.
        max_num_tokens: Most query tokens.
        device: Where the graph runs.
        spaces: Id spaces that a step writes to.
        draft_token_num: Widest draft window; 0 where nothing is verified.
        sink_slot: What padding writes to.
    """

    def __init__(
        self,
        max_bs: int,
        max_num_tokens: int,
        device: torch.device,
        *,
        spaces: tuple[KVSpace, ...] = (KVSpace.FULL,),
        draft_token_num: int = 0,
        sink_slot: int = 0,
    ) -> None:
        self.max_bs, self.max_num_tokens, self.sink_slot = max_bs, max_num_tokens, sink_slot
        self.spaces, self.draft_token_num = frozenset(spaces), draft_token_num

        def full(n: int, fill: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((n,), fill, dtype=dtype, device=device)

        self.req_pool_indices, self.seq_lens = full(max_bs, 0), full(max_bs, 0)
        self.positions, self.out_cache_loc = full(max_num_tokens, 0), full(max_num_tokens, sink_slot)
        self.extend_seq_lens = full(max_bs, 0, torch.int32)
        self.extend_prefix_lens = full(max_bs, 0, torch.int32)
        self.extend_start_loc = full(max_bs, 0, torch.int32)
        self.encoder_lens = full(max_bs, 0)
        self.write_slots = {space: full(max_num_tokens, sink_slot) for space in spaces}
        self.state_slots = full(max_bs, -1, torch.int32)
        self.has_initial_state = full(max_bs, 0, torch.bool)
        self.track_slots, self.track_lens = full(max_bs, -1, torch.int32), full(max_bs, 0)
        self.parents = full(max_bs * draft_token_num, 0).view(max_bs, draft_token_num)
        self.accept_lens = full(max_bs, 0, torch.int32)
        self.mask_seq_lens = full(max_bs, 0)

    def clear(self) -> None:
        """Point every write at the sink, in every space: a capture must not write where an earlier step did."""
        for slots in (self.out_cache_loc, *self.write_slots.values()):
            slots.fill_(self.sink_slot)
        self.state_slots.fill_(-1)
        self.track_slots.fill_(-1)
        for zeroed in (self.req_pool_indices, self.positions, self.seq_lens, self.encoder_lens):
            zeroed.zero_()

    def problems(self, batch: ForwardBatch, *, pad_to: int | None = None) -> list[str]:
        """Return why a batch, padded to a size, has no room here."""
        found = []
        bs, tokens = batch.batch_size, batch.num_tokens
        if pad_to is not None and pad_to > bs:
            bs, tokens = pad_to, tokens + (pad_to - bs) * max(batch.query_lens_cpu, default=1)
        if bs > self.max_bs or tokens > self.max_num_tokens:
            found.append(
                f"{bs} requests and {tokens} tokens; the graph's buffers hold {self.max_bs} and {self.max_num_tokens}"
            )
        spaces = set() if batch.kv_loc_plan is None else set(batch.kv_loc_plan.write_slots)
        for space in sorted(spaces - self.spaces, key=lambda s: s.value):
            found.append(f"the step writes to the {space.value} space; the graph's buffers lack it")
        parents = batch.spec_info.parents if batch.spec_info else None
        if parents is not None and parents.shape[1] > self.draft_token_num:
            found.append(f"a draft window of {parents.shape[1]}; the graph's buffers hold {self.draft_token_num}")
        return found

    def load(self, batch: ForwardBatch, *, pad_to: int | None = None, seq_len_fill: int = 1) -> ForwardBatch:
        """Copy a step in and return the batch that reads these tensors; nothing synchronises.

        Args:
            batch: The step; padded, its query width is uniform.
            pad_to: How many requests the result has, with padding as ``ForwardBatch.pad`` makes it.
            seq_len_fill: Length of padding requests.

        Raises:
            BatchError: The batch is larger than the buffers.
        """
        size = batch.batch_size if pad_to is None else pad_to
        problems = self.problems(batch, pad_to=size)
        if problems:
            raise BatchError(problems)
        padding = Padding(0, 0, 0)
        if size != batch.batch_size:
            padding = padding_of(batch, size, seq_len_fill=seq_len_fill)
        step, (extra, width, fill) = _Load(), padding
        tokens, sink = extra * width, self.sink_slot
        rows = step.put(self.req_pool_indices, batch.req_pool_indices, extra, 0)
        plan, starts = batch.kv_loc_plan, step.put(self.extend_start_loc, batch.extend_start_loc, 0, 0)
        if starts is not None and extra:
            more = width * torch.arange(extra, dtype=torch.int32, device=batch.device)
            starts = self.extend_start_loc[:size]
            starts[batch.batch_size :].copy_(more.add_(batch.num_tokens))
        view = batch.replace(
            **(padded_numbers(batch, padding) if extra else {}),
            uses_graph_buffers=True,
            req_pool_indices=rows,
            seq_lens=step.put(self.seq_lens, batch.seq_lens, extra, fill),
            positions=step.put(self.positions, batch.positions, tokens, 0),
            out_cache_loc=step.put(self.out_cache_loc, batch.out_cache_loc, tokens, sink),
            extend_seq_lens=step.put(self.extend_seq_lens, batch.extend_seq_lens, extra, width),
            extend_prefix_lens=step.put(self.extend_prefix_lens, batch.extend_prefix_lens, extra, fill - width),
            extend_start_loc=starts,
            encoder_lens=step.put(self.encoder_lens, batch.encoder_lens, extra, 0),
            spec_info=self._load_spec_info(step, batch, extra, fill),
            kv_loc_plan=None if plan is None else self._load_plan(step, plan, rows, tokens),
            state=None if batch.state is None else self._load_state(step, batch.state, extra),
        )
        step.copy()
        return view

    def clear_tail(self, tokens: int, upto: int) -> None:
        """Make token rows from ``tokens`` to ``upto`` padding: position 0, writes to the sink."""
        if upto > tokens:
            self.positions[tokens:upto].zero_()
            for slots in (self.out_cache_loc, *self.write_slots.values()):
                slots[tokens:upto].fill_(self.sink_slot)

    def _load_plan(self, step: _Load, plan: KVLocPlan, rows: Tensor, extra: int) -> KVLocPlan:
        # The encoder's rows are its own: padding requests bring none.
        writes = {
            space: step.put(self.write_slots[space], slots, 0 if space is KVSpace.ENCODER else extra, self.sink_slot)
            for space, slots in plan.write_slots.items()
        }
        return KVLocPlan(plan.translator_id, rows, writes, plan.layer_spaces)

    def _load_state(self, step: _Load, state: LinearState, extra: int) -> LinearState:
        return LinearState(
            slots=step.put(self.state_slots, state.slots, extra, -1),
            has_initial_state=step.put(self.has_initial_state, state.has_initial_state, extra, 0),
            track_slots=step.put(self.track_slots, state.track_slots, extra, -1),
            track_lens=step.put(self.track_lens, state.track_lens, extra, 0),
        )

    def _load_spec_info(self, step: _Load, batch: ForwardBatch, extra: int, fill: int) -> SpecInfo | None:
        info = batch.spec_info
        if info is None:
            return None
        width, parents = info.draft_token_num, info.parents
        if parents is not None:
            whole, n = self.parents[: parents.shape[0] + extra, :width], parents.shape[0]
            whole[:n].copy_(parents)
            if extra:
                whole[n:].copy_(torch.arange(-1, width - 1, dtype=whole.dtype, device=whole.device))
            parents = whole
        lens, missing = info.mask_seq_lens, 0
        if lens is not None and extra:
            # A padding row has cells of its own only past those of the batch that the mask was filled for.
            missing = max(0, info.mask_row + batch.batch_size + extra - lens.shape[0])
        return SpecInfo(
            width,
            info.mask,
            info.mask_row,
            step.put(self.mask_seq_lens, lens, missing, fill),
            parents,
            step.put(self.accept_lens, info.accept_lens, extra, 0),
        )


class _Load:
    """One step's copies, gathered so that tensors of one dtype travel in one call."""

    def __init__(self) -> None:
        self._to: dict[torch.dtype, list[Tensor]] = {}
        self._from: dict[torch.dtype, list[Tensor]] = {}
        self._zeros: dict[torch.dtype, list[Tensor]] = {}

    def put(self, buffer: Tensor, value: _T, extra: int, fill: int) -> _T:
        """Return the buffer's view of a value and ``extra`` rows of padding after it."""
        if value is None:
            return None
        n = value.shape[0]
        if n:
            self._to.setdefault(buffer.dtype, []).append(buffer[:n])
            self._from.setdefault(buffer.dtype, []).append(value)
        if extra:
            tail = buffer[n : n + extra]
            if fill:
                tail.fill_(fill)
            else:
                self._zeros.setdefault(buffer.dtype, []).append(tail)
        return buffer[: n + extra]

    def copy(self) -> None:
        """Do what was gathered."""
        for dtype, targets in self._to.items():
            torch._foreach_copy_(targets, self._from[dtype])
        for tails in self._zeros.values():
            torch._foreach_zero_(tails)
