"""A graph's copy of the batch: tensors of fixed address, sized by the maxima, into which each step is loaded."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from ..batch import ForwardBatch, LinearState
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

    def problems(self, batch: ForwardBatch) -> list[str]:
        """Return why a batch has no room here."""
        found = []
        bs, tokens = batch.batch_size, batch.num_tokens
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
        padded = batch if pad_to is None else batch.pad(pad_to, seq_len_fill=seq_len_fill, sink_slot=self.sink_slot)
        problems = self.problems(padded)
        if problems:
            raise BatchError(problems)
        rows = _put(self.req_pool_indices, padded.req_pool_indices)
        return padded.replace(
            uses_graph_buffers=True,
            req_pool_indices=rows,
            seq_lens=_put(self.seq_lens, padded.seq_lens),
            positions=_put(self.positions, padded.positions),
            out_cache_loc=_put(self.out_cache_loc, padded.out_cache_loc),
            extend_seq_lens=_put(self.extend_seq_lens, padded.extend_seq_lens),
            extend_prefix_lens=_put(self.extend_prefix_lens, padded.extend_prefix_lens),
            extend_start_loc=_put(self.extend_start_loc, padded.extend_start_loc),
            encoder_lens=_put(self.encoder_lens, padded.encoder_lens),
            spec_info=self._load_spec_info(padded.spec_info),
            kv_loc_plan=None if padded.kv_loc_plan is None else self._load_plan(padded.kv_loc_plan, rows),
            state=None if padded.state is None else self._load_state(padded.state),
        )

    def clear_tail(self, tokens: int, upto: int) -> None:
        """Make token rows from ``tokens`` to ``upto`` padding: position 0, writes to the sink."""
        if upto > tokens:
            self.positions[tokens:upto].zero_()
            for slots in (self.out_cache_loc, *self.write_slots.values()):
                slots[tokens:upto].fill_(self.sink_slot)

    def _load_plan(self, plan: KVLocPlan, rows: Tensor) -> KVLocPlan:
        writes = {space: _put(self.write_slots[space], slots) for space, slots in plan.write_slots.items()}
        return KVLocPlan(plan.translator_id, rows, writes, plan.layer_spaces)

    def _load_state(self, state: LinearState) -> LinearState:
        return LinearState(
            slots=_put(self.state_slots, state.slots),
            has_initial_state=_put(self.has_initial_state, state.has_initial_state),
            track_slots=_put(self.track_slots, state.track_slots),
            track_lens=_put(self.track_lens, state.track_lens),
        )

    def _load_spec_info(self, info: SpecInfo | None) -> SpecInfo | None:
        if info is None:
            return None
        return SpecInfo(
            info.draft_token_num,
            info.mask,
            info.mask_row,
            _put(self.mask_seq_lens, info.mask_seq_lens),
            None if info.parents is None else _put(self.parents[:, : info.draft_token_num], info.parents),
            _put(self.accept_lens, info.accept_lens),
        )


def _put(buffer: Tensor, value: _T) -> _T:
    if value is None:
        return None
    view = buffer[: value.shape[0]]
    view.copy_(value)
    return view
