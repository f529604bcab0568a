"""Decode steps from graphs: captured at the first of them, every batch size of the buckets, the largest first."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from logging import getLogger
from typing import Any, Literal

import torch
from torch import Tensor

from attnplug.backend import AttentionBackend
from attnplug.batch import ForwardBatch
from attnplug.errors import ConfigError, ContractViolation
from attnplug.graphs.buckets import batch_buckets
from attnplug.graphs.capture import EmulatedGraphs
from attnplug.graphs.full import GraphRunner
from attnplug.graphs.overlap import ReadEndFence
from attnplug.modes import GraphLevel

from .batch_builder import StepInputs
from .errors import EngineError

__all__ = ["GraphChoice", "StepGraphs"]

GraphChoice = Literal["auto", "off", "emulated"]
"""'auto': CUDA graphs where there is a GPU and the backend serves them; 'emulated': graphs that a CPU runs, by the same
path, to prove it; 'off': none."""

_CHOICES = ("auto", "off", "emulated")
_log = getLogger(__name__)


class StepGraphs:
    """Serves decode steps from graphs where it can, and counts why the others ran eagerly.

    Args:
        forward: The model's forward without its metadata: (input_ids [T], batch) to logits [T, vocabulary]. Runs at
            warm-up and capture only.
        backend: Serves its attention.
        choice: See ``GraphChoice``.
        device: Where steps run.
        max_batch_size: Most requests of a step.
        buckets: Batch sizes to capture; empty for the default ones.
        fence: Where the steps' shared reads end, for overlap scheduling.

    Raises:
        ConfigError: The choice is none of the three, or a bucket is larger than any step.
    """

    def __init__(
        self,
        forward: Callable[[Tensor, ForwardBatch], Tensor],
        backend: AttentionBackend,
        *,
        choice: str,
        device: torch.device,
        max_batch_size: int,
        buckets: Sequence[int] = (),
        fence: ReadEndFence | None = None,
    ) -> None:
        if choice not in _CHOICES:
            raise ConfigError(
                f"graphs is {choice!r}; allowed: {', '.join(_CHOICES)}", key="graphs", value=choice, remedy="correct it"
            )
        self.buckets = batch_buckets(max_batch_size, buckets)
        self.refusal = _refusal(choice, backend, device)
        """Why no step is replayed; empty where decode steps are."""
        self.num_replays = 0
        self.eager_steps: Counter[str] = Counter()
        """How many steps ran eagerly, by each reason."""
        self._runner: GraphRunner | None = None
        if not self.refusal:
            self._runner = GraphRunner(
                lambda given, batch: forward(given["input_ids"], batch),
                backend,
                buckets=self.buckets,
                device=device,
                fence=fence,
                factory=EmulatedGraphs() if choice == "emulated" else None,
            )

    def run(self, step: StepInputs) -> Tensor | None:
        """Replay a step.

        Args:
            step: Any step of the engine.

        Returns:
            Its logits [T, vocabulary], which the next replay overwrites; None where the step must run eagerly.

        Raises:
            EngineError: The first decode step could not be captured for a reason that no rule of graphs names.
        """
        reasons = self._reasons(step)
        if not reasons:
            assert self._runner is not None  # it is a reason otherwise
            logits = self._runner.run({"input_ids": step.input_ids}, step.batch)
            assert isinstance(logits, Tensor)  # forward returns one
            self.num_replays += 1
            return logits
        self.eager_steps.update(reasons)
        return None

    def close(self) -> None:
        """Give back the graphs and their memory; later steps run eagerly."""
        self._runner, self.refusal = None, self.refusal or "the engine is closed"

    def facts(self) -> dict[str, Any]:
        """Return what was served from graphs so far, and why the rest was not, as plain data."""
        return {
            "refusal": self.refusal,
            "buckets": list(self.buckets),
            "replays": self.num_replays,
            "eager_steps": dict(self.eager_steps),
        }

    def _reasons(self, step: StepInputs) -> list[str]:
        if self.refusal:
            return [self.refusal]
        assert self._runner is not None
        batch = step.batch
        if not batch.forward_mode.is_decode:
            return [f"{batch.forward_mode.value} steps run eagerly"]
        reasons = self._runner.can_run(batch)
        if reasons or self._runner.kinds:
            return reasons
        self._capture(self._runner, step)
        return [self.refusal] if self.refusal else []

    def _capture(self, runner: GraphRunner, step: StepInputs) -> None:
        sizes, start = ", ".join(str(size) for size in self.buckets), time.perf_counter()
        _log.info("capturing decode steps of %s requests", sizes)
        try:
            runner.capture({"input_ids": step.input_ids}, step.batch)
        except ContractViolation as violation:
            # A rule that names the operation and its line: a model whose forward reads values on the host, say.
            self._runner = None
            self.refusal = f"its decode step cannot be captured: {violation.message}"
            warnings.warn(f"graphs are off for this engine; {self.refusal}", stacklevel=2)
        except RuntimeError as error:
            raise EngineError(
                f"capturing the first decode step failed: {error}", remedy="set graphs = 'off' and report the model"
            ) from error
        else:
            _log.info("captured decode steps of %s requests in %.1f s", sizes, time.perf_counter() - start)


def _refusal(choice: str, backend: AttentionBackend, device: torch.device) -> str:
    if choice == "off":
        return "graphs are off"
    if backend.graph_level < GraphLevel.DECODE:
        return f"{backend.name} serves no graphs here (its graph level is {backend.graph_level.name})"
    if choice == "auto" and device.type != "cuda":
        return f"graphs need a GPU; this engine runs on {device.type}"
    return ""
