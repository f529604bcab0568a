"""Requests of several callers over one core: each call gets its own, whoever's step made it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count

from .core import EngineCore
from .detokenize import Tokenizer, decode
from .errors import EngineError
from .intake import Intake, Prompt
from .request import EngineRequest
from .results import Completion, StepOutput, StreamChunk
from .sampling import SamplingParams

__all__ = ["RequestLoop"]


class RequestLoop:
    """The calls by which requests enter and leave an engine; those of several threads take turns, step by step.

    Args:
        core: Runs the steps.
        intake: Makes requests.
        tokenizer: For ``Completion.text``.
    """

    def __init__(self, core: EngineCore, intake: Intake, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._core, self._intake = core, intake
        self._ids = count()
        # Who drives a request gets its outputs, whichever thread's step made them.
        self._boxes: dict[int, deque[StepOutput]] = {}
        self._step_box: deque[StepOutput] = deque()
        self._lock = threading.RLock()
        self._closed = False

    @property
    def has_work(self) -> bool:
        """Whether a step would do or deliver anything."""
        with self._lock:
            return bool(self._step_box) or self._core.has_work

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int | Sequence[int] = 128,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete prompts, batched continuously.

        Args:
            prompts: Texts, or lists of token ids.
            max_new_tokens: For all, or one a prompt.
            sampling: For all, or one a prompt; greedy by default.

        Returns:
            A completion a prompt, in their order. One that ran out of pages has ``finish_reason`` "error".

        Raises:
            RequestRefused: Prompts that can never be served, all named; nothing has run then.
            EngineError: The engine is closed.
        """
        requests = self._make(prompts, max_new_tokens, sampling, stream=False)
        for _ in self._drive(requests):
            pass
        return [self._completion(request) for request in requests]

    def generate_stream(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int | Sequence[int] = 128,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamChunk]:
        """Yield tokens and text as they come; arguments as for ``generate``, and checked at the call.

        Closing the iterator aborts what is unfinished.
        """
        requests = self._make(prompts, max_new_tokens, sampling, stream=True)
        return self._chunks(requests)

    def add_request(
        self, prompt: Prompt, max_new_tokens: int = 128, sampling: SamplingParams | None = None, *, stream: bool = True
    ) -> int:
        """Queue a request for ``step`` and return its id.

        Args:
            prompt: A text, or token ids.
            max_new_tokens: Most new tokens.
            sampling: Greedy by default.
            stream: Whether step outputs carry text.

        Raises:
            RequestRefused: It can never be served.
        """
        (request,) = self._make([prompt], max_new_tokens, sampling, stream=stream)
        with self._lock:
            self._boxes[request.request_id] = self._step_box
            self._core.add(request)
        return request.request_id

    def abort(self, request_id: int) -> bool:
        """End a request, wherever it is; its last output has ``finish_reason`` "abort". False where it has ended."""
        with self._lock:
            return self._core.abort(request_id)

    def abort_all(self) -> None:
        """End every request."""
        with self._lock:
            for request_id in self._core.unfinished:
                self._core.abort(request_id)

    def step(self) -> list[StepOutput]:
        """Run one step and return what was made for requests of ``add_request``; empty where nothing is left to do.

        Where the model or the backend raises, the requests of that step end with ``finish_reason`` "error", told by the
        next call; their pages are free, and the engine goes on.

        Raises:
            Exception: Whatever the model or the backend raised.
        """
        with self._lock:
            self._step()
            outputs = list(self._step_box)
            self._step_box.clear()
            return outputs

    def _make(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int | Sequence[int],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        *,
        stream: bool,
    ) -> list[EngineRequest]:
        if self._closed:
            # Its backend has given its workspaces back: a step would read memory that is another's by now.
            raise EngineError("the engine is closed, and serves nothing more", remedy="make another Engine")
        return self._intake.make(prompts, max_new_tokens, sampling, self._ids, stream=stream)

    def _step(self) -> None:
        for output in self._core.step():
            box = self._boxes.get(output.request_id)
            if box is not None:
                box.append(output)
            if output.finish_reason is not None:
                self._boxes.pop(output.request_id, None)

    def _drive(self, requests: Sequence[EngineRequest]) -> Iterator[StepOutput]:
        """Step until these requests have ended, and yield their outputs as they come."""
        box: deque[StepOutput] = deque()
        left = {request.request_id for request in requests}
        try:
            with self._lock:
                for request in requests:
                    self._boxes[request.request_id] = box
                    self._core.add(request)
            while left:
                with self._lock:
                    if not box:
                        self._step()
                while box:
                    output = box.popleft()
                    if output.finish_reason is not None:
                        left.discard(output.request_id)
                    yield output
        finally:
            with self._lock:
                for request_id in left:
                    self._boxes.pop(request_id, None)
                    self._core.abort(request_id)

    def _chunks(self, requests: Sequence[EngineRequest]) -> Iterator[StreamChunk]:
        index = {request.request_id: at for at, request in enumerate(requests)}
        for output in self._drive(requests):
            yield StreamChunk(index[output.request_id], *output[1:])

    def _completion(self, request: EngineRequest) -> Completion:
        text = ""
        if request.text is not None:
            text = request.text.text
        elif self.tokenizer is not None:
            text = decode(self.tokenizer, request.output)
        assert request.finish_reason is not None  # _drive ends only when every request has
        return Completion(request.output, text, request.finish_reason, request.error)
