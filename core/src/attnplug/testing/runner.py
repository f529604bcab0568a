"""Run cases in this process: one result a case, whatever the backend does short of taking the process with it."""

from __future__ import annotations

import fnmatch
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ..backend import AttentionBackend
from ..errors import AttnplugError, BackendRejected
from ..spec import BackendSpec
from .axes import AXES, find_check
from .case import Case
from .plan import Plan, Profile
from .results import Failure, NotRun, Report, Result, Status
from .subject import BackendFactory, Subject
from .topics import topics_of


def list_cases(plan: Plan, axes: Sequence[str] = (), *, shard: tuple[int, int] = (1, 1)) -> list[Case]:
    """Return the cases of a plan, each once, in a fixed order.

    Args:
        plan: Subject and profile.
        axes: Letters; every axis by default.
        shard: (i, n): every n-th case from the i-th on, 1-based.
    """
    cases: dict[str, Case] = {}
    for letter, axis in AXES.items():
        if not axes or letter in axes:
            for case in axis.cases(plan):
                cases.setdefault(case.id, case)
    index, count = shard
    return list(cases.values())[index - 1 :: count]


def run_case(subject: Subject, case: Case, *, waivers: Mapping[str, str] | None = None) -> Result:
    """Run one case and return what came of it.

    Args:
        subject: The backend under test.
        case: What to run.
        waivers: Patterns of case ids that the vendor has said will fail, with why.
    """
    check = find_check(case.axis, case.check)
    start = time.perf_counter()
    status, message, fault, served_by, smallest = Status.PROVEN, "", "", "", ""
    try:
        outcome = check.run(subject, case)
        status, served_by, message = outcome.status, outcome.served_by, outcome.message
    except NotRun as reason:
        status, message = Status.NOT_RUN, str(reason)
    except Failure as failure:
        status, message, fault, smallest = Status.FAILED, str(failure), failure.fault, failure.smallest
    except BackendRejected as error:
        status, message, fault = Status.FAILED, f"declared, and refused: {error}", "refuses what it declares"
    except torch.cuda.OutOfMemoryError as error:
        # A case that needs much memory asks for it first and says NotRun; any other fits a small part of a device.
        status, fault = Status.FAILED, "takes more memory than its case has"
        message = f"the backend ran out of device memory: {str(error).splitlines()[0]}"
    # The subject is foreign code, and its failure is this case's result.
    except Exception as error:
        status, message, fault = Status.FAILED, _raised(error), _fault_of(error)
    if status is Status.FAILED:
        waiver = next((why for pattern, why in (waivers or {}).items() if fnmatch.fnmatchcase(case.id, pattern)), None)
        if waiver is not None:
            status, message = Status.WAIVED, f"waived by the vendor: {waiver}; {message}"
    seconds = time.perf_counter() - start
    return Result(case.id, status, check.claim, message, fault, seconds, served_by, smallest, topics_of(case))


def run_cases(
    subject: Subject,
    cases: Iterable[Case],
    *,
    waivers: Mapping[str, str] | None = None,
    on_result: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Run cases in order; ``on_result`` is told of each as it is there."""
    results = []
    for case in cases:
        result = run_case(subject, case, waivers=waivers)
        results.append(result)
        if on_result is not None:
            on_result(result)
    return results


def run_suite(
    factory: BackendFactory | type[AttentionBackend],
    spec: BackendSpec,
    *,
    axes: Sequence[str] = (),
    profile: str = "quick",
    device: str = "cpu",
    cases: Iterable[Case] | None = None,
    waivers: Mapping[str, str] | None = None,
    stop_after: int | None = None,
) -> Report:
    """Judge a backend that need not be installed, in this process.

    Args:
        factory: Makes a backend from a BackendEnv; a class that takes one will do.
        spec: What it declares.
        axes: Letters; every axis by default.
        profile: quick, gpu or full.
        device: torch's name of a device.
        cases: Run these instead of the axes' own.
        waivers: Patterns of case ids that may fail, with why.
        stop_after: End after so many failures; None runs everything.
    """
    subject = Subject(spec.name, spec, factory, torch.device(device))
    plan = Plan(subject, Profile.named(profile))
    report = new_report(plan, waivers=waivers)
    for case in list_cases(plan, axes) if cases is None else cases:
        report.results.append(run_case(subject, case, waivers=waivers))
        if stop_after is not None and len(report.failures) >= stop_after:
            break
    return report


def new_report(plan: Plan, *, shard: str = "1/1", waivers: Mapping[str, str] | None = None) -> Report:
    """Return an empty report that says what it is of."""
    from .describe import spec_as_dict, versions

    subject = plan.subject
    return Report(
        backend=subject.name,
        device=_device_words(subject.device),
        profile=plan.profile.name.lower(),
        shard=shard,
        spec=spec_as_dict(subject.spec),
        versions={**versions(), **plan.subject.versions},
        waivers=dict(waivers or {}),
    )


def _raised(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/attnplug/testing/" not in frame.filename]
    last = (own or frames)[-1]
    text = str(error).strip() or "no message"
    return f"raised {type(error).__name__}: {text} (at {last.filename}:{last.lineno})"


def _fault_of(error: BaseException) -> str:
    if isinstance(error, IndexError) or "out of range" in str(error) or "out of bounds" in str(error):
        return "reads table entries beyond a request's length"
    return "" if isinstance(error, AttnplugError) else f"raises {type(error).__name__}"


def _device_words(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return f"{device} {torch.cuda.get_device_name(device)}"
