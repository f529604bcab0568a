"""What runs in the next step: first come, first served; decoding goes on while prompts are taken in by chunks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from attnplug.errors import OutOfPages
from attnplug.modes import ForwardMode

from .encoder_room import EncoderRoom
from .pages import PageAllocator, RequestTable
from .request import EngineRequest, RequestStatus
from .results import FinishReason

__all__ = ["ScheduledRows", "Scheduler", "SchedulerLimits", "StepPlan"]


class ScheduledRows(NamedTuple):
    """Tokens ``start … start + num_tokens`` of a request, computed in one step."""

    request: EngineRequest
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the last of them is the request's last, so that the next one is chosen after it."""
        return self.start + self.num_tokens == self.request.length

    @property
    def is_ahead(self) -> bool:
        """Whether the last of them is on the device alone."""
        return self.start + self.num_tokens > len(self.request.tokens)


class StepPlan(NamedTuple):
    """One step's work; empty rows: nothing can run."""

    mode: ForwardMode
    rows: list[ScheduledRows]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """How much one step may hold."""

    max_batch_size: int
    max_num_tokens: int
    chunk_size: int
    """Most prompt tokens of a step, over all requests."""
    mixed: bool
    """Whether decode rows and prompt chunks may share a step; else the two take turns."""


@dataclass(slots=True)
class Scheduler:
    """Admits, orders, preempts and ends requests; the only owner of pages and table rows.

    A prompt gets all its pages at admission, and a decoding request one page at a time. When none is left, the request
    that was admitted last gives up its pages and waits again at the head of the queue: its tokens are kept, their keys
    computed anew.
    """

    limits: SchedulerLimits
    pages: PageAllocator
    table: RequestTable
    encoder: EncoderRoom | None = None
    """Of a model whose decoder reads an encoder."""
    waiting: deque[EngineRequest] = field(default_factory=deque)
    running: list[EngineRequest] = field(default_factory=list)
    """In the order of admission."""
    num_preemptions: int = 0
    _failed: list[EngineRequest] = field(default_factory=list)
    _decoded_last: bool = True

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._failed)

    def add(self, request: EngineRequest) -> None:
        """Put a request at the end of the queue."""
        self.waiting.append(request)

    def schedule(self) -> StepPlan:
        """Choose the next step's rows; pages for them are allocated."""
        decoding = any(request.is_decoding for request in self.running)
        if self.limits.mixed or not decoding or not self._decoded_last:
            decodes = self._decode_rows() if decoding else []
            if decodes and not self.limits.mixed:
                self._decoded_last = True
                return StepPlan(ForwardMode.DECODE, decodes)
            chunks = self._chunks(len(decodes))
            self._decoded_last = not chunks
        else:
            # Turns: a prompt chunk between two decode steps, where there is one.
            chunks = self._chunks(0)
            self._decoded_last = not chunks
            decodes = [] if chunks else self._decode_rows()
        if not chunks:
            return StepPlan(ForwardMode.DECODE, decodes)
        return StepPlan(ForwardMode.MIXED if decodes else ForwardMode.EXTEND, decodes + chunks)

    def take_failed(self) -> list[EngineRequest]:
        """Return the requests that ended with an error while scheduling, once."""
        failed, self._failed = self._failed, []
        return failed

    def finish(self, request: EngineRequest, reason: FinishReason, error: str = "") -> None:
        """End a request wherever it is; its pages and row are free at once. Nothing happens to one that has ended."""
        if request.status is RequestStatus.FINISHED:
            return
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        elif request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._release(request)
        if self.encoder is not None:
            self.encoder.release(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.error = reason, error

    def retire(self, request: EngineRequest) -> None:
        """Schedule a running request no more: its last token is computed, and ``finish`` follows when it is known.

        Its pages and row are free at once: what another writes there, the device does after the step that was given.
        """
        self.running.remove(request)
        self._release(request)
        request.status = RequestStatus.ENDING

    @property
    def is_short(self) -> bool:
        """Whether fewer pages are free than the next token of each decoding request needs."""
        missing = [self._missing(request) for request in self.running if request.is_decoding]
        return sum(missing) > self.pages.num_free

    def _missing(self, request: EngineRequest) -> int:
        return self.pages.pages_for(request.num_computed + 1) - len(request.pages)

    def _decode_rows(self) -> list[ScheduledRows]:
        rows = []
        for request in [one for one in self.running if one.is_decoding]:
            if request.status is RequestStatus.RUNNING and self._make_room(request):
                rows.append(ScheduledRows(request, request.num_computed, 1))
        return rows

    def _make_room(self, request: EngineRequest) -> bool:
        """Give a decoding request the page its next token needs; False where it lost its place instead."""
        missing = self._missing(request)
        while missing > self.pages.num_free:
            victim = self.running[-1]
            if victim is request:
                if len(self.running) > 1:
                    self._preempt(request)
                else:
                    self._fail_alone(request)
                return False
            self._preempt(victim)
        if missing > 0:
            self._grow(request, missing)
        return True

    def _fail_alone(self, request: EngineRequest) -> None:
        error = OutOfPages(
            f"request {request.request_id} has {len(request.tokens)} tokens in all {len(request.pages)} pages",
            remedy="raise num_pages, or ask for fewer tokens",
        )
        self.finish(request, "error", str(error))
        self._failed.append(request)

    def _chunks(self, num_decodes: int) -> list[ScheduledRows]:
        budget = min(self.limits.chunk_size, self.limits.max_num_tokens - num_decodes)
        rows, encoder_rows = [], 0 if self.encoder is None else self.encoder.max_rows
        for request in self.running:
            if budget and not request.is_decoding:
                rows.append(self._chunk(request, budget))
                budget -= rows[-1].num_tokens
        while budget and self.waiting and self._admit(self.waiting[0], encoder_rows):
            rows.append(self._chunk(self.running[-1], budget))
            budget -= rows[-1].num_tokens
            if self.encoder is not None:
                encoder_rows -= self.encoder.assign(self.running[-1])
        return rows

    def _chunk(self, request: EngineRequest, budget: int) -> ScheduledRows:
        return ScheduledRows(request, request.num_computed, min(budget, request.num_pending))

    def _admit(self, request: EngineRequest, encoder_rows: int) -> bool:
        """Give the head of the queue its row and pages, if they are free."""
        if len(self.running) >= self.limits.max_batch_size or not self.table.num_free_rows:
            return False
        if self.encoder is not None and not self.encoder.admits(request, encoder_rows):
            return False
        needed = self.pages.pages_for(request.length)
        # One page for each running request stays free, or its next page would preempt the newcomer at once.
        if needed > self.pages.num_free - len(self.running):
            return False
        self.waiting.popleft()
        request.row, request.status = self.table.take_row(), RequestStatus.RUNNING
        self._grow(request, needed)
        self.running.append(request)
        return True

    def _grow(self, request: EngineRequest, count: int) -> None:
        pages = self.pages.allocate(count)
        self.table.assign(request.row, len(request.pages), pages)
        request.pages.extend(pages)

    def _preempt(self, request: EngineRequest) -> None:
        self.num_preemptions += 1
        self.running.remove(request)
        self._release(request)
        request.status, request.num_computed = RequestStatus.WAITING, 0
        self.waiting.appendleft(request)

    def _release(self, request: EngineRequest) -> None:
        self.pages.release(request.pages)
        request.pages.clear()
        self.table.release_row(request.row)
        request.row = 0
