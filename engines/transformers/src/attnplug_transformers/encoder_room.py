"""Slots of the encoder space: taken when a request is admitted, kept through preemption, given back when it ends."""

from __future__ import annotations

from dataclasses import dataclass

from .pages import PageAllocator, RequestTable
from .request import EngineRequest

__all__ = ["EncoderRoom"]


@dataclass(frozen=True, slots=True)
class EncoderRoom:
    """Pages and table of the encoder space; a request's row is the same in both tables.

    A preempted request keeps its pages, so its encoder runs once: those pages are of no use to the decoder space that
    ran short, and the request waits at the head of the queue, before all that have none yet.
    """

    pages: PageAllocator
    table: RequestTable
    max_rows: int
    """Most encoder rows of a step; at least those of the longest input."""

    def admits(self, request: EngineRequest, rows_left: int) -> bool:
        """Whether a request's encoder may run in a step with so many rows left, or has run already."""
        if request.encoder_pages or request.encoder is None:
            return True
        rows = request.encoder.num_rows
        return rows <= rows_left and self.pages.pages_for(rows) <= self.pages.num_free

    def assign(self, request: EngineRequest) -> int:
        """Give an admitted request its slots; returns the rows that its encoder will make now."""
        if request.encoder is None:
            return 0
        if not request.encoder_pages:
            request.encoder_pages.extend(self.pages.allocate(self.pages.pages_for(request.encoder.num_rows)))
        self.table.assign(request.row, 0, request.encoder_pages)
        return 0 if request.encoded else request.encoder.num_rows

    def release(self, request: EngineRequest) -> None:
        """Take an ended request's pages back."""
        self.pages.release(request.encoder_pages)
        request.encoder_pages.clear()
