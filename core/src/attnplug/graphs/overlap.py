"""Overlap scheduling: an event where a step stops reading what the scheduler overwrites, and the wait behind it.

While the device runs step n, the host prepares step n + 1. It may overwrite shared tensors (the request table, lengths,
page tables) only after step n has read them; each backend declares where that is, and the fence records an event there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..modes import SharedReadEnds
from .capture import CapturedGraph


class ReadEvent(Protocol):
    """A point in the device's work."""

    def record(self) -> None:
        """Put the point behind all work given so far; inside a capture it is reached at each replay."""


class _HostEvent:
    """On a CPU work is done when it is given, so recording is being reached."""

    def __init__(self, reached: Callable[[], None]) -> None:
        self.record = reached


class ReadEndFence:
    """Records where a step's shared reads end; the scheduler waits here before it overwrites.

    One step at a time: a step's ``arm`` follows the wait for the step before it.

    Args:
        device: Where steps run.
        on_read_end: Called as the event is recorded, with the point: what it then gives to the current stream runs
            right after the declared read end. Under an emulated graph also inside a replay.
    """

    def __init__(self, device: torch.device, *, on_read_end: Callable[[SharedReadEnds], None] | None = None) -> None:
        self.device, self._on_read_end = device, on_read_end
        self.effective: SharedReadEnds | None = None
        """Where the step's event is recorded; None before the first step."""
        self.downgrade = ""
        """Why that is later than declared; empty where it is not."""
        self._on_gpu = device.type == "cuda"
        self._event: Any = _gpu_event() if self._on_gpu else None
        self._in_graph: Any = _gpu_event(external=True) if self._on_gpu else _HostEvent(self._reached_in_replay)

    def mark(self, graph: CapturedGraph) -> bool:
        """Record the in-graph event at this place of a capture; False where this torch has no such event."""
        if self._in_graph is None:
            return False
        graph.mark(self._in_graph.record)
        return True

    def arm(self, ends: SharedReadEnds, *, marked: bool = False) -> None:
        """Begin a step.

        Args:
            ends: What its backends declare.
            marked: The graph about to be replayed has the in-graph event; an eager step has no need of it.
        """
        self.effective, self.downgrade = ends, ""
        if ends is SharedReadEnds.IN_REPLAY and not marked:
            self.effective = SharedReadEnds.POST_REPLAY
            self.downgrade = "IN_REPLAY became POST_REPLAY: the graph holds no event (torch.cuda.Event lacks external)"
        self._marked = marked

    def arm_eager(self, ends: SharedReadEnds) -> None:
        """Begin a step that is not replayed: every point is recorded from the host."""
        self.effective, self.downgrade, self._marked = ends, "", False

    def reached(self, point: SharedReadEnds) -> None:
        """Say that all work up to a point of the step was given to the current stream."""
        if self.effective is None:
            return
        # Of an unaudited step only the end is known.
        due = min(self.effective, SharedReadEnds.POST_REPLAY)
        if point is due and not (self._marked and point is SharedReadEnds.IN_REPLAY):
            if self._on_gpu:
                self._event.record()
            self._tell(self.effective)

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Put a stream's further work behind the step's read end; the host does not wait, but for UNKNOWN.

        Args:
            stream: Whose work overwrites shared tensors; None: the current stream.
        """
        if not self._on_gpu or self.effective is None:
            return
        if self.effective is SharedReadEnds.UNKNOWN:
            # Nobody has said which streams read: the whole device is the fence.
            torch.cuda.synchronize(self.device)
            return
        (stream or torch.cuda.current_stream(self.device)).wait_event(self._current())

    def synchronize(self) -> None:
        """Wait on the host: before pinned memory that the step copies from is written again."""
        if not self._on_gpu or self.effective is None:
            return
        if self.effective is SharedReadEnds.UNKNOWN:
            torch.cuda.synchronize(self.device)
        else:
            self._current().synchronize()

    def _current(self) -> Any:
        return self._in_graph if self._marked and self.effective is SharedReadEnds.IN_REPLAY else self._event

    def _reached_in_replay(self) -> None:
        if self.effective is SharedReadEnds.IN_REPLAY:
            self._tell(SharedReadEnds.IN_REPLAY)

    def _tell(self, point: SharedReadEnds) -> None:
        if self._on_read_end is not None:
            self._on_read_end(point)

    _marked = False


def _gpu_event(**flags: bool) -> Any:
    """Return an event; None where this torch lacks a flag: only newer ones let a graph record an ``external`` event."""
    try:
        return torch.cuda.Event(**flags)  # type: ignore[no-untyped-call]
    except TypeError:
        return None
