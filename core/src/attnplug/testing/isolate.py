"""Run a suite in a child process, so that a backend which takes its process along is a failed case and not the end.

The child says over a pipe which case it starts and what came of it. When it dies, the case that it had started has
failed, and another child goes on with the next.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ..errors import AttnplugError, BackendLoadError, ConfigError
from .results import Report, Result, Status

CASE_SECONDS = 600.0
"""A case that is silent for longer hangs: the longest in full takes tens of seconds."""
SAVE_EVERY = 50
"""Results between two writes of the report: a run that is stopped loses no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a child is to run."""

    backend: str
    device: str = ""
    """Empty: the first of the backend's device types that this machine has."""
    profile: str = "quick"
    shard: tuple[int, int] = (1, 1)
    axes: tuple[str, ...] = ()
    """Letters; empty: every axis."""
    case: str = ""
    """One case instead of all."""
    waivers: Mapping[str, str] = field(default_factory=dict)
    case_seconds: float = CASE_SECONDS

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for the child."""
        return {name: getattr(self, name) for name in ("backend", "device", "profile", "shard", "axes", "case")} | {
            "waivers": dict(self.waivers)
        }


@dataclass(slots=True)
class _Progress:
    """What is known of a run, over all its children."""

    job: Job
    report_path: Path | None
    on_result: Callable[[Result], None]
    done: dict[str, Result]
    report: Report | None = None
    claims: dict[str, str] = field(default_factory=dict)
    started: str = ""
    new: int = 0

    def take(self, line: dict[str, Any]) -> None:
        if "report" in line:
            found = Report(**line["report"])
            check_same_run(found, self.report_path)
            self.report, self.claims = found, line["claims"]
        elif "error" in line:
            # It says its remedy itself: it was one of the family in the child.
            raise AttnplugError(line["error"])
        elif "start" in line:
            self.started = line["start"]
        else:
            self.finish(Result.from_dict(line["result"]))

    def finish(self, result: Result) -> None:
        self.done[result.case] = result
        self.on_result(result)
        self.new += 1
        if self.new % SAVE_EVERY == 0:
            self.save()

    def save(self) -> Report:
        assert self.report is not None
        # What an earlier run of other axes found stays in the file.
        order = dict.fromkeys([*self.claims, *self.done])
        self.report.results = [self.done[case] for case in order if case in self.done]
        if self.report_path is not None:
            self.report.save(self.report_path)
        return self.report


def run_apart(
    job: Job,
    *,
    report_path: Path | None = None,
    on_result: Callable[[Result], None] = lambda result: None,
) -> Report:
    """Run a job in children, and return its report.

    Args:
        job: What to run.
        report_path: An existing report there is gone on with: its finished cases are not run again. Written as results
            come, so that a run which is stopped can be gone on with.
        on_result: Told of each new result.

    Raises:
        ConfigError: The report there is of another backend, device, profile, shard or declaration.
        BackendLoadError: The child cannot even list the cases.
    """
    earlier = Report.load(report_path).finished() if report_path is not None and report_path.exists() else {}
    progress = _Progress(job, report_path, on_result, dict(earlier))
    while True:
        progress.started = ""
        ended = _run_child(progress)
        if progress.report is None:
            raise BackendLoadError(
                f"the suite could not start for backend {job.backend!r}: the process {ended}",
                remedy="`attnplug doctor --load` shows what fails to import",
            )
        crashed = progress.started if progress.started not in progress.done else ""
        went_on = "" if crashed else progress.started
        if crashed:
            claim = progress.claims[crashed]
            message = f"the process {ended} in this case"
            progress.finish(Result(crashed, Status.FAILED, claim, message, "crashes the process"))
        report = progress.save()
        if all(case in progress.done for case in progress.claims):
            return report
        if not crashed and not went_on:
            raise BackendLoadError(
                f"the suite stopped for backend {job.backend!r}: the process {ended}",
                remedy="run it again with --report FILE, which goes on where it stopped",
            )


def check_same_run(found: Report, path: Path | None) -> None:
    """Refuse to go on with a report that is of something else; raises ConfigError."""
    if path is None or not path.exists():
        return
    earlier = Report.load(path)
    names = ("backend", "device", "profile", "shard", "spec", "versions", "waivers")
    other = [name for name in names if getattr(earlier, name) != getattr(found, name)]
    if other:
        words = "; ".join(
            f"{name}: {_short(getattr(earlier, name))}, now {_short(getattr(found, name))}" for name in other
        )
        raise ConfigError(
            f"{path} holds another run: {words}",
            source=str(path),
            allowed="a report of the same backend, device, profile, shard, declaration, versions and waivers",
            remedy="give another file, or delete this one to run everything again",
        )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 60 else text[:57] + "…"


def _run_child(progress: _Progress) -> str:
    """Run one child to its end, and say how it ended."""
    job = progress.job
    read, write = os.pipe()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        task = json.dumps({**job.as_dict(), "skip": sorted(progress.done)})
        command = [sys.executable, "-m", "attnplug.testing.worker", str(write)]
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, text=True, pass_fds=(write,)
        )
        os.close(write)
        assert child.stdin is not None
        with os.fdopen(read, encoding="utf-8") as lines:
            try:
                child.stdin.write(task)
                child.stdin.close()
            except BrokenPipeError:
                pass  # It is gone already; how it ended says why.
            hung = False
            try:
                for line in _watched(lines, child, job.case_seconds):
                    progress.take(json.loads(line))
            except TimeoutError:
                hung = True
            except BaseException:
                child.kill()
                raise
            finally:
                code = child.wait()
        return _ended(code, hung, job.case_seconds, output)


def _watched(lines: IO[str], child: subprocess.Popen[str], seconds: float) -> Iterator[str]:
    """Yield lines; kill the child and raise TimeoutError where none comes for too long."""
    late = threading.Event()

    def kill() -> None:
        late.set()
        child.kill()

    while True:
        timer = threading.Timer(seconds, kill)
        timer.start()
        line = lines.readline()
        timer.cancel()
        if late.is_set():
            raise TimeoutError
        if not line.endswith("\n"):
            return  # The end, or half a line of a child that died writing it.
        yield line


def _ended(code: int, hung: bool, seconds: float, output: IO[str]) -> str:
    output.seek(0)
    last = [line for line in output.read().splitlines() if line.strip()][-4:]
    said = f"; it said: {' | '.join(last)}" if last else ""
    if hung:
        return f"was ended after {seconds:.0f} s without a sign of life{said}"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}{said}"
    return f"exited with {code}{said}" if code else "ended"
