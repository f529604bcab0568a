"""A step that was given to the device, until the host knows the tokens it chose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .batch_builder import Ahead
from .request import EngineRequest, RequestStatus
from .scheduler import StepPlan

__all__ = ["Flight"]


class Flight:
    """One step on its way.

    Args:
        plan: What it computes.
        sampled: The requests that get a token of it, in order.
        ids: [n] int64, device: those tokens; copied to the host behind the step, without waiting.
    """

    def __init__(self, plan: StepPlan, sampled: list[EngineRequest], ids: Tensor | None) -> None:
        self.plan, self.sampled, self._ids = plan, sampled, ids
        self._event: Any = None
        self._host = ids
        if ids is not None and ids.device.type == "cuda":
            self._host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            self._host.copy_(ids, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(ids.device))

    @property
    def is_done(self) -> bool:
        """Whether the device has chosen its tokens."""
        return self._event is None or bool(self._event.query())

    @property
    def is_dead(self) -> bool:
        """Whether every request of it has ended, so that nobody wants what it makes."""
        return all(row.request.status is RequestStatus.FINISHED for row in self.plan.rows)

    @property
    def ahead(self) -> Ahead | None:
        """Its tokens, for the step after it."""
        if self._ids is None:
            return None
        return Ahead(self._ids, {request.request_id: place for place, request in enumerate(self.sampled)})

    def tokens(self) -> list[int]:
        """Wait for its tokens and return them, one a sampled request."""
        if self._host is None:
            return []
        if self._event is not None:
            self._event.synchronize()
        ids: list[int] = self._host.tolist()
        return ids
