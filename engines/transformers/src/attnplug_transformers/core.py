"""The engine's core: requests go in, each step gives what it made."""

from __future__ import annotations

from attnplug.errors import AttnplugError

from .batch_builder import BatchBuilder
from .request import EngineRequest
from .results import StepOutput
from .runner import ModelRunner
from .sampling import sample
from .scheduler import Scheduler, StepPlan

__all__ = ["EngineCore"]


class EngineCore:
    """Schedules, runs and samples; not thread-safe.

    Args:
        scheduler: Owns the requests that have not ended, and pages and rows.
        builder: Makes batches.
        runner: Runs the model.
        num_slots: Check the values of each batch against a pool of so many slots; None: do not, it synchronises.
    """

    def __init__(
        self, scheduler: Scheduler, builder: BatchBuilder, runner: ModelRunner, *, num_slots: int | None = None
    ) -> None:
        self.scheduler, self._builder, self._runner, self._num_slots = scheduler, builder, runner, num_slots
        self._requests: dict[int, EngineRequest] = {}
        self._undelivered: list[StepOutput] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would do or deliver anything."""
        return bool(self._undelivered) or self.scheduler.has_work

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
        self.scheduler.finish(request, "abort")
        self._undelivered.append(self._output(request, []))
        return True

    def step(self) -> list[StepOutput]:
        """Run one step; see ``Engine.step``."""
        plan = self.scheduler.schedule()
        self._undelivered += [self._output(request, []) for request in self.scheduler.take_failed()]
        if plan.rows:
            try:
                tokens = self._forward(plan)
            except BaseException as error:  # Also an interrupt must not leave requests half done; it goes on upward.
                self._fail(plan, error)
                raise
            self._commit(plan, tokens)
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def _forward(self, plan: StepPlan) -> list[int]:
        """Return a token for each row that samples, in order."""
        inputs = self._builder.build(plan)
        if self._num_slots is not None:
            inputs.batch.validate_values(num_slots=self._num_slots)
            if inputs.encoder is not None:
                inputs.encoder.batch.validate_values(num_slots=self._num_slots)
        logits = self._runner.run(inputs)
        sampling = [row.request for row in plan.rows if row.samples]
        if not sampling:
            return []
        params = [request.params for request in sampling]
        return sample(logits, params, [0.0 if r.params.is_greedy else r.rng.random() for r in sampling])

    def _commit(self, plan: StepPlan, tokens: list[int]) -> None:
        chosen = iter(tokens)
        for row in plan.rows:
            request, samples = row.request, row.samples
            request.num_computed += row.num_tokens
            request.encoded = request.encoder is not None
            if not samples:
                continue
            token = next(chosen)
            request.append(token)
            if request.finish_reason is not None:
                self.scheduler.finish(request, request.finish_reason)
            self._undelivered.append(self._output(request, [token]))

    def _fail(self, plan: StepPlan, error: BaseException) -> None:
        text = error.message if isinstance(error, AttnplugError) else f"{type(error).__name__}: {error}"
        for row in plan.rows:
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
