"""The engine's core: requests go in, each step gives what it made."""

from __future__ import annotations

from collections import deque

from attnplug.errors import AttnplugError
from attnplug.graphs.overlap import ReadEndFence

from .batch_builder import BatchBuilder
from .flight import Flight
from .request import EngineRequest, RequestStatus
from .results import StepOutput
from .runner import ModelRunner
from .sampling import choose
from .scheduler import Scheduler, StepPlan

__all__ = ["EngineCore"]


class EngineCore:
    """Schedules, runs and samples; not thread-safe.

    With a fence, step n + 1 is scheduled, built and given to the device while step n runs: its rows take step n's
    tokens on the device. A request that turns out to have ended in step n is in step n + 1 all the same, and what it
    gets there is dropped, so that nobody sees a token more.

    Args:
        scheduler: Owns the requests that have not ended, and pages and rows.
        builder: Makes batches.
        runner: Runs the model.
        num_slots: Check the values of each batch against a pool of so many slots; None: do not, it synchronises.
        fence: Where a step stops reading what the next one's preparation overwrites; None: one step at a time.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        builder: BatchBuilder,
        runner: ModelRunner,
        *,
        num_slots: int | None = None,
        fence: ReadEndFence | None = None,
    ) -> None:
        self.scheduler, self._builder, self._runner, self._num_slots = scheduler, builder, runner, num_slots
        self._fence = fence
        self._requests: dict[int, EngineRequest] = {}
        self._undelivered: list[StepOutput] = []
        self._flights: deque[Flight] = deque()
        """Steps that were given and whose tokens are not known: at most two, and between calls at most one."""
        self.num_overlapped = 0
        """Steps that were given while the one before had not been waited for."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do or deliver anything."""
        return bool(self._undelivered or self._flights) or self.scheduler.has_work

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Ids of the requests that have not ended."""
        return tuple(self._requests)

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""
        self._requests[request.request_id] = request
        self.scheduler.add(request)

    def abort(self, request_id: int) -> bool:
        """End a request wherever it is; its last output comes with the next step. False where it has ended."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        # A step that was given may compute a token more for it, which is dropped as it comes.
        self.scheduler.finish(request, "abort")
        self._undelivered.append(self._output(request, []))
        return True

    def step(self) -> list[StepOutput]:
        """Run one step; see ``Engine.step``."""
        if not self._flights:
            self._launch()
        # Who gives way to whom is decided with every token known, so that it is decided as without overlap.
        if self._flights and self._fence is not None and not self.scheduler.is_short:
            self._launch()
        if self._flights:
            self._land()
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def _launch(self) -> None:
        """Schedule a step and give it to the device; nothing where nothing can run."""
        before = self._flights[-1] if self._flights else None
        if before is not None and self._fence is not None:
            self._fence.wait()
        plan = self.scheduler.schedule()
        self._undelivered += [self._output(request, []) for request in self.scheduler.take_failed()]
        if not plan.rows:
            return
        try:
            flight = self._forward(plan, before)
        except BaseException as error:  # Also an interrupt must not leave requests half done; it goes on upward.
            try:
                self._land_all()
            finally:
                self._fail(plan, error)
            raise
        self.num_overlapped += before is not None
        self._flights.append(flight)
        for row in plan.rows:
            row.request.num_computed += row.num_tokens
            row.request.encoded = row.request.encoder is not None
        for request in flight.sampled:
            request.num_ahead += 1
            if request.is_full:
                self.scheduler.retire(request)

    def _forward(self, plan: StepPlan, before: Flight | None) -> Flight:
        inputs = self._builder.build(plan, None if before is None else before.ahead)
        if self._num_slots is not None:
            inputs.batch.validate_values(num_slots=self._num_slots)
            if inputs.encoder is not None:
                inputs.encoder.batch.validate_values(num_slots=self._num_slots)
        logits = self._runner.run(inputs)
        sampled = [row.request for row in plan.rows if row.samples]
        if not sampled:
            return Flight(plan, sampled, None)
        params = [request.params for request in sampled]
        uniforms = [0.0 if request.params.is_greedy else request.rng.random() for request in sampled]
        return Flight(plan, sampled, choose(logits, params, uniforms))

    def _land(self) -> None:
        """Wait for the oldest step and take its tokens."""
        flight = self._flights[0]
        try:
            tokens = flight.tokens()
        except RuntimeError as error:
            # The device failed in it, and so in all that was given after it.
            while self._flights:
                self._fail(self._flights.popleft().plan, error)
            raise
        self._flights.popleft()
        for request, token in zip(flight.sampled, tokens):
            request.num_ahead -= 1
            if request.status is RequestStatus.FINISHED:
                continue  # It had ended a step before; this one was given before that was known.
            request.append(token)
            if request.finish_reason is not None:
                self.scheduler.finish(request, request.finish_reason)
            self._undelivered.append(self._output(request, [token]))
        while self._flights and self._flights[0].is_dead:
            self._flights.popleft()

    def _land_all(self) -> None:
        while self._flights:
            self._land()

    def _fail(self, plan: StepPlan, error: BaseException) -> None:
        text = error.message if isinstance(error, AttnplugError) else f"{type(error).__name__}: {error}"
        for row in plan.rows:
            if row.request.status is not RequestStatus.FINISHED:
                self.scheduler.finish(row.request, "error", f"the step failed: {text}")
                self._undelivered.append(self._output(row.request, []))

    def _output(self, request: EngineRequest, tokens: list[int]) -> StepOutput:
        ended = request.finish_reason is not None
        if ended:
            self._requests.pop(request.request_id, None)
        text = ""
        if request.text is not None:
            if ended:
                request.text.finish()
            text = request.text.take(final=ended)
        return StepOutput(request.request_id, tokens, text, request.finish_reason, request.error)
