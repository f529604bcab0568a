"""A graph's copy of the batch: tensors of fixed address, sized by the maxima, into which each step is loaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..batch import ForwardBatch, LinearState
from ..errors import BatchError
from ..kv.plan import KVLocPlan
from ..modes import KVSpace
from ..spec_info import SpecInfo


class BatchBuffers:
    """Fixed tensors for every device field of a batch of uniform query width.

    Slices share addresses: the batches of all sizes read the same memory. Host numbers are taken from the step.

    Args:
        max_bs: Most requests.
        max_num_tokens: Most query tokens.
        device: Where the graph runs.
        spaces: Id spaces that a step writes to.
        draft_token_num: Widest draft window; 0 where nothing is verified.
    """

    def __init__(
        self,
        max_bs: int,
        max_num_tokens: int,
        device: torch.device,
        *,
        spaces: tuple[KVSpace, ...] = (KVSpace.FULL,),
        draft_token_num: int = 0,
    ) -> None:
        self.max_bs, self.max_num_tokens = max_bs, max_num_tokens

        def zeros(n: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(n, dtype=dtype, device=device)

        self.req_pool_indices, self.seq_lens = zeros(max_bs), zeros(max_bs)
        self.positions, self.out_cache_loc = zeros(max_num_tokens), zeros(max_num_tokens)
        self.extend_seq_lens = zeros(max_bs, torch.int32)
        self.extend_prefix_lens = zeros(max_bs, torch.int32)
        self.extend_start_loc = zeros(max_bs, torch.int32)
        self.encoder_lens = zeros(max_bs)
        # Zero is the sink in every space, so what was never loaded is never written over a token.
        self.write_slots = {space: zeros(max_num_tokens) for space in spaces}
        self.state_slots = torch.full((max_bs,), -1, dtype=torch.int32, device=device)
        self.has_initial_state = zeros(max_bs, torch.bool)
        self.parents = zeros(max_bs * draft_token_num).view(max_bs, draft_token_num)
        self.accept_lens = zeros(max_bs, torch.int32)

    def load(self, batch: ForwardBatch) -> ForwardBatch:
        """Copy a step in and return the batch that reads these tensors; nothing synchronises.

        Raises:
            BatchError: The batch is larger than the buffers.
        """
        bs, tokens = batch.batch_size, batch.num_tokens
        if bs > self.max_bs or tokens > self.max_num_tokens:
            raise BatchError(
                [f"{bs} requests and {tokens} tokens; the graph's buffers hold {self.max_bs} and {self.max_num_tokens}"]
            )

        def put(buffer: Tensor, value: Tensor | None) -> Tensor | None:
            if value is None:
                return None
            view = buffer[: value.shape[0]]
            view.copy_(value)
            return view

        plan, state = batch.kv_loc_plan, batch.state
        rows = put(self.req_pool_indices, batch.req_pool_indices)
        assert rows is not None  # a batch always has rows
        return batch.replace(
            uses_graph_buffers=True,
            req_pool_indices=rows,
            seq_lens=put(self.seq_lens, batch.seq_lens),
            positions=put(self.positions, batch.positions),
            out_cache_loc=put(self.out_cache_loc, batch.out_cache_loc),
            extend_seq_lens=put(self.extend_seq_lens, batch.extend_seq_lens),
            extend_prefix_lens=put(self.extend_prefix_lens, batch.extend_prefix_lens),
            extend_start_loc=put(self.extend_start_loc, batch.extend_start_loc),
            encoder_lens=put(self.encoder_lens, batch.encoder_lens),
            spec_info=self._load_spec_info(batch.spec_info),
            kv_loc_plan=None if plan is None else self._load_plan(plan, rows),
            state=None
            if state is None
            else LinearState(
                slots=put(self.state_slots, state.slots),  # type: ignore[arg-type]
                has_initial_state=put(self.has_initial_state, state.has_initial_state),  # type: ignore[arg-type]
            ),
        )

    def _load_plan(self, plan: KVLocPlan, rows: Tensor) -> KVLocPlan:
        writes: Mapping[KVSpace, Tensor] = {space: self._load_slots(space, t) for space, t in plan.write_slots.items()}
        return KVLocPlan(plan.translator_id, rows, writes, plan.layer_spaces)

    def _load_slots(self, space: KVSpace, slots: Tensor) -> Tensor:
        if space not in self.write_slots:
            raise BatchError([f"the step writes to the {space.value} space; the graph's buffers lack it"])
        view = self.write_slots[space][: slots.shape[0]]
        view.copy_(slots)
        return view

    def _load_spec_info(self, info: SpecInfo | None) -> SpecInfo | None:
        if info is None:
            return None
        parents, accept = info.parents, info.accept_lens
        if parents is not None:
            view = self.parents[: parents.shape[0]]
            view.copy_(parents)
            parents = view
        if accept is not None:
            kept = self.accept_lens[: accept.shape[0]]
            kept.copy_(accept)
            accept = kept
        return SpecInfo(info.draft_token_num, info.mask, info.mask_row, info.mask_seq_lens, parents, accept)
