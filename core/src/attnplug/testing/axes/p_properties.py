"""Axis P: shapes and lengths that nobody chose, drawn by hypothesis, and the smallest case that fails."""

from __future__ import annotations

from collections.abc import Iterator

from ..case import Case
from ..plan import Plan, Profile
from ..results import NotRun
from ..subject import Subject
from .axis import Axis, Check, Outcome, oracle_check

EXAMPLES = {Profile.QUICK: 12, Profile.GPU: 25, Profile.FULL: 150}
"""Drawn cases a mode."""


def _cases(plan: Plan) -> Iterator[Case]:
    if plan.softmax:
        for mode in plan.modes:
            mask = plan.verify_forms()[-1] if mode.is_target_verify else ""
            yield plan.case("P", "drawn", mode, mask=mask, arg=str(EXAMPLES[plan.profile]))


def _drawn(subject: Subject, case: Case) -> Outcome:
    """Draw ``arg`` cases of the mode from the case's seed, and hold each against the oracle."""
    try:
        import hypothesis
    except ImportError as error:
        raise NotRun("hypothesis is not installed: pip install 'attnplug[testing]'") from error
    del hypothesis
    from ..drawing import first_failure

    found = first_failure(subject, case, int(case.arg))
    if found is not None:
        raise found
    return Outcome(served_by=subject.name, message=f"{case.arg} cases drawn")


AXIS = Axis(
    "P",
    "drawn shapes",
    _cases,
    {
        "drawn": Check("whatever lengths, heads, pages and features are drawn, the result is the oracle's", _drawn),
        "shape": oracle_check("a drawn case gives the oracle's result"),
    },
)
