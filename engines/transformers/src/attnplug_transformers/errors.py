"""What an engine refuses, as members of the core's one family of errors."""

from __future__ import annotations

from collections.abc import Mapping

from attnplug.errors import AttnplugError

__all__ = ["EngineError", "RequestRefused", "StepFailed"]


class EngineError(AttnplugError):
    """An engine cannot do what it was asked."""


class StepFailed(EngineError):
    """The model or the backend raised while a step ran; the cause is chained."""


class RequestRefused(EngineError):
    """Requests that can never be served; nothing of the call they came with has run.

    Args:
        problems: For each refused request, by its place in the call, every reason against it.
        remedy: What to do about it.
    """

    def __init__(self, problems: Mapping[int, tuple[str, ...]], *, remedy: str = "") -> None:
        self.problems = dict(problems)
        lines = [f"  prompt {index}: {text}" for index, texts in self.problems.items() for text in texts]
        super().__init__("\n".join(["cannot serve:", *lines]), remedy=remedy)
