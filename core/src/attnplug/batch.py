"""One step's batch: the schema that an engine fills and every backend reads. B requests, T query tokens."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, model_validator
from torch import Tensor

from .batch_checks import cheap_problems, full_problems
from .errors import BatchError
from .kv.plan import KVLocPlan
from .modes import ForwardMode, KVSpace
from .spec_info import SpecInfo


class LinearState(BaseModel):
    """What layers with a recurrent state read of a step."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True, extra="forbid")

    slots: Tensor
    """[B] int32, device: the state slot of each request; -1 pads and is skipped, 0 is reserved."""
    has_initial_state: Tensor
    """[B] bool, device: whether the slot holds the state of an earlier chunk; else what it holds is ignored."""
    track_slots: Tensor | None = None
    """[B] int32, device: where a checkpoint of the state goes, -1 for none."""
    track_lens: Tensor | None = None
    """[B] int64, device: after how many tokens of the request the checkpoint is taken."""

    def rows(self, part: slice) -> LinearState:
        """Return the part of some requests, as views."""
        return LinearState(
            slots=self.slots[part],
            has_initial_state=self.has_initial_state[part],
            track_slots=None if self.track_slots is None else self.track_slots[part],
            track_lens=None if self.track_lens is None else self.track_lens[part],
        )


class ForwardBatch(BaseModel):
    """A step's batch, frozen and validated once, at the boundary; a backend never writes to it.

    ``seq_lens`` counts by mode: all KV positions after the step (EXTEND, DECODE, MIXED, DRAFT_EXTEND, SPLIT_PREFILL,
    DLLM_EXTEND), or those before the draft window (TARGET_VERIFY). Kernels take ``kv_lens(space)``, never their own.
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True, extra="forbid")

    forward_mode: ForwardMode
    batch_size: int
    """B, padding requests included."""
    num_padding: int = 0
    """Requests at the end that only pad; their rows write the sink."""
    req_pool_indices: Tensor
    """[B] int64, device: rows of ``req_to_token``; row 0 is the padding row."""
    seq_lens: Tensor
    """[B] int64, device."""
    seq_lens_cpu: Tensor | None = None
    """[B] int64, host mirror; None where no backend reads it."""
    seq_lens_cpu_exact: bool = True
    """False: the mirror and the numbers below are upper bounds."""
    seq_lens_sum: int
    max_seq_len: int
    positions: Tensor
    """[T] int64, device: position of each query in its request."""
    out_cache_loc: Tensor
    """[T] int64, device: the slot each token is scheduled to be written to, before translation."""
    extend_seq_lens: Tensor | None = None
    """[B] int32, device: queries of each request, in the extend modes."""
    extend_prefix_lens: Tensor | None = None
    """[B] int32, device: cached positions before them."""
    extend_start_loc: Tensor | None = None
    """[B] int32, device: exclusive sum of extend_seq_lens."""
    extend_seq_lens_cpu: tuple[int, ...] | None = None
    extend_prefix_lens_cpu: tuple[int, ...] | None = None
    extend_num_tokens: int = 0
    encoder_lens: Tensor | None = None
    """[B] int64, device: positions of the encoder that cross attention reads."""
    encoder_lens_cpu: tuple[int, ...] | None = None
    encoder_new_lens_cpu: tuple[int, ...] | None = None
    """Encoder rows that this step brings, a request each: 0 where the encoder's keys are reused."""
    encoder_out_cache_loc: Tensor | None = None
    """[T of the encoder] int64, device: slots in the encoder space; None when the encoder's keys are reused."""
    spec_info: SpecInfo | None = None
    kv_loc_plan: KVLocPlan | None = None
    state: LinearState | None = None
    uses_graph_buffers: bool = False
    """The tensors are a graph's own, of fixed address: a backend writes this step's metadata into its fixed buffers."""
    logical_forward_mode: ForwardMode | None = None
    """What the scheduler meant, where ``forward_mode`` was relabelled; None: the same."""

    @model_validator(mode="after")
    def _check(self) -> ForwardBatch:
        problems = cheap_problems(self)
        if problems:
            raise BatchError(problems)
        return self

    def validate_values(self, *, num_slots: int | None = None, max_context_len: int | None = None) -> None:
        """Check values too, which synchronises: for tests, ``doctor`` and debugging.

        Args:
            num_slots: Slots of the pool that out_cache_loc writes to; None leaves the range unchecked.
            max_context_len: Longest context; None leaves it unchecked.

        Raises:
            BatchError: Naming every field at fault.
        """
        problems = full_problems(self, num_slots=num_slots, max_context_len=max_context_len)
        if problems:
            raise BatchError(problems)

    @property
    def num_tokens(self) -> int:
        """T, padding rows included."""
        return self.positions.shape[0]

    @property
    def logical_mode(self) -> ForwardMode:
        """The scheduler's mode, by which layers with a state dispatch."""
        return self.logical_forward_mode or self.forward_mode

    @property
    def device(self) -> torch.device:
        return self.seq_lens.device

    @property
    def draft_token_num(self) -> int:
        """Width of the draft window; 0 outside target-verify."""
        return self.spec_info.draft_token_num if self.forward_mode.is_target_verify and self.spec_info else 0

    @property
    def query_lens_cpu(self) -> tuple[int, ...]:
        """Queries of each request, on the host, in every mode."""
        if self.forward_mode.is_decode:
            return (1,) * self.batch_size
        if self.forward_mode.is_target_verify:
            return (self.draft_token_num,) * self.batch_size
        if self.forward_mode is ForwardMode.IDLE:
            return (0,) * self.batch_size
        assert self.extend_seq_lens_cpu is not None  # checked at construction
        return self.extend_seq_lens_cpu

    @property
    def max_query_len(self) -> int:
        """Most queries of a request."""
        return max(self.query_lens_cpu, default=0)

    def query_lens(self) -> Tensor:
        """Return the queries of each request, [B] int64, device, without a synchronisation."""
        if self.extend_seq_lens is not None:
            return self.extend_seq_lens.to(torch.int64)
        if self.forward_mode is ForwardMode.IDLE:
            return torch.zeros_like(self.seq_lens)
        return torch.full_like(self.seq_lens, self.draft_token_num or 1)

    def qo_indptr(self, out: Tensor | None = None) -> Tensor:
        """Return where each request's queries start, [B + 1] int32, device; written to ``out`` where it is given."""
        indptr = torch.zeros(self.batch_size + 1, dtype=torch.int32, device=self.device) if out is None else out
        torch.cumsum(self.query_lens().to(torch.int32), 0, dtype=torch.int32, out=indptr[1 : self.batch_size + 1])
        return indptr[: self.batch_size + 1]

    def kv_lens(self, space: KVSpace = KVSpace.FULL) -> Tensor:
        """Return the KV positions readable in this step, [B] int64, device, in every mode.

        The window space counts positions as the full one does: its slots are those of the last positions, and a layer
        reads from ``kv_start_idx`` on.

        Raises:
            BatchError: The encoder's lengths are asked for and the batch has none.
        """
        if space is KVSpace.ENCODER:
            if self.encoder_lens is None:
                raise BatchError(
                    ["encoder_lens is None, but a layer attends to the encoder"],
                    remedy="give encoder_lens in the ForwardBatch",
                )
            return self.encoder_lens
        if self.forward_mode is ForwardMode.IDLE:
            return torch.zeros_like(self.seq_lens)
        width = self.draft_token_num
        return self.seq_lens + width if width else self.seq_lens

    def kv_lens_cpu(self, space: KVSpace = KVSpace.FULL) -> tuple[int, ...] | None:
        """Return ``kv_lens`` on the host, or None where the batch has no mirror; upper bounds where it is not exact."""
        if space is KVSpace.ENCODER:
            return self.encoder_lens_cpu
        if self.seq_lens_cpu is None:
            return None
        width = self.draft_token_num
        if self.forward_mode is ForwardMode.IDLE:
            return (0,) * self.batch_size
        return tuple(n + width for n in self.seq_lens_cpu.tolist())

    def kv_start_idx(self, sliding_window_size: int) -> Tensor:
        """Return the first position that any query of a request may see under a window, [B] int64, device."""
        if sliding_window_size < 0:
            return torch.zeros_like(self.seq_lens)
        first_query = self.kv_lens() - self.query_lens()
        return (first_query - sliding_window_size).clamp_min(0)

    def slice(self, start: int, stop: int) -> ForwardBatch:
        """Return requests ``start … stop`` as a batch of its own; every tensor is a view."""
        from .batch_parts import slice_batch

        return slice_batch(self, start, stop)

    def pad(self, batch_size: int, *, seq_len_fill: int, sink_slot: int = 0) -> ForwardBatch:
        """Return the batch with padding requests up to a size: row 0, a small legal length, writes to the sink."""
        from .batch_parts import pad_batch

        return pad_batch(self, batch_size, seq_len_fill=seq_len_fill, sink_slot=sink_slot)

    def replay_view(self, buffers: Any) -> ForwardBatch:
        """Copy the batch into a graph's fixed buffers and return the batch that reads them.

        Args:
            buffers: An ``attnplug.graphs.buffers.BatchBuffers`` with room for this batch.
        """
        view: ForwardBatch = buffers.load(self)
        return view

    def replace(self, **changes: Any) -> ForwardBatch:
        """Return a copy with some fields changed, validated anew."""
        return ForwardBatch(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})
