"""The suite is tested: it fails each faulty backend with a message that names the fault, and passes the right one."""

from __future__ import annotations

import fnmatch
import re

import pytest

from attnplug.spec import BackendSpec
from attnplug.testing.case import Case
from attnplug.testing.plan import Plan
from attnplug.testing.results import Result, Status
from attnplug.testing.runner import list_cases, run_case

from . import contract, declarations, latent, replays, scores, storage, visibility  # noqa: F401 - they fill the zoo
from .fault import FAULTS, Fault

LEAST = 120


def cases_of(fault: Fault) -> list[Case]:
    """The first cases of the quick profile that may catch a fault, as the suite would draw them for its declaration."""
    found = [case for case in list_cases(Plan(fault.subject())) if fnmatch.fnmatchcase(case.id, fault.where)]
    assert found, f"no case of the quick profile matches {fault.where}"
    return found[: fault.tries]


_right: dict[tuple[object, BackendSpec, str], Result] = {}


def right_result(fault: Fault, case: Case) -> Result:
    key = (fault.right, fault.spec, case.id)
    if key not in _right:
        _right[key] = run_case(fault.base(), case)
    return _right[key]


def test_the_zoo_is_large_and_each_fault_has_a_name_of_its_own() -> None:
    assert len(FAULTS) >= LEAST
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("index", range(len(FAULTS)), ids=lambda index: FAULTS[index].name.replace(" ", "_"))
def test_a_faulty_backend_fails_by_name_where_the_right_one_passes(index: int) -> None:
    fault = FAULTS[index]
    results = []
    for case in cases_of(fault):
        results.append(run_case(fault.subject(), case))
        # Only a right backend that passes the same case shows that the fault is what was caught.
        assert right_result(fault, case).status in (Status.PROVEN, Status.REFUSED)
        if results[-1].status is Status.FAILED:
            break
    last = results[-1]
    assert last.status is Status.FAILED, f"nothing caught it: {[result.case for result in results]}"
    assert re.search(fault.says, f"{last.fault}: {last.message}", re.DOTALL), f"named {last.fault!r}: {last.message}"
