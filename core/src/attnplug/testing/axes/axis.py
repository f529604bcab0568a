"""What an axis is: the cases it draws from a declaration, and the checks that judge them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..bench import Bench
from ..case import Case
from ..plan import Plan
from ..results import Status
from ..subject import Subject


class Outcome(NamedTuple):
    """What a check that did not fail found."""

    status: Status = Status.PROVEN
    served_by: str = ""
    message: str = ""


class Check(NamedTuple):
    """One way to judge a case."""

    claim: str
    """What is proven where it passes: a sentence that a failure prints."""
    run: Callable[[Subject, Case], Outcome]


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension of the suite."""

    letter: str
    title: str
    cases: Callable[[Plan], Iterable[Case]]
    checks: Mapping[str, Check]


def against_oracle(subject: Subject, case: Case) -> Outcome:
    """Run the case's own step, padded where it says so, and compare with the oracle."""
    bench = Bench(subject, case)
    step = bench.step()
    if case.pad:
        step = bench.pad(step, case.pad)
    bench.prove(step)
    bench.close()
    return Outcome(served_by=bench.served_by)


def oracle_check(claim: str) -> Check:
    """Return a check whose claim is that the case's step is as the oracle says."""
    return Check(claim, against_oracle)
