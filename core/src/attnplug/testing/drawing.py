"""Cases drawn by hypothesis within a declaration, and shrunk to the smallest that fails."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from ..errors import BackendRejected
from ..modes import ForwardMode
from ..spec import Feature
from .axes.axis import against_oracle
from .case import Case, LayerCase
from .data import shared_prefix
from .plan import Plan
from .results import Failure
from .subject import Subject

SHRINK_SECONDS = 6.0
"""A failure is shown smaller, within reason: most of what shrinking gains comes in its first hundred tries."""
LONGEST = 90
"""Positions of a drawn request: past four pages of 16 and one of 64."""


def first_failure(subject: Subject, case: Case, examples: int) -> Failure | None:
    """Draw cases until one fails; return its failure, made as small as time allows.

    Args:
        subject: The backend under test.
        case: Its mode, mask and seed are every drawn case's.
        examples: How many to draw.
    """
    plan, worst = Plan(subject), _Worst()

    @seed(case.seed)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(cases(plan, case))
    def holds(drawn: Case) -> None:
        if worst.is_late and drawn.id != worst.case:
            return
        failure = _failure_of(subject, drawn)
        if failure is not None:
            worst.note(drawn.id, failure)
            raise failure

    try:
        holds()
    except Failure:
        return worst.failure
    return None


class _Worst:
    """The smallest failure so far."""

    def __init__(self) -> None:
        self.case, self.failure, self._since = "", None, 0.0

    failure: Failure | None

    @property
    def is_late(self) -> bool:
        return self.failure is not None and time.monotonic() - self._since > SHRINK_SECONDS

    def note(self, case: str, failure: Failure) -> None:
        self._since = self._since or time.monotonic()
        self.case = case
        self.failure = Failure(str(failure), fault=failure.fault, smallest=case)


def _failure_of(subject: Subject, case: Case) -> Failure | None:
    try:
        against_oracle(subject, case)
    except Failure as failure:
        return failure
    except BackendRejected as error:
        return Failure(f"declared, and refused: {error}", fault="refuses what it declares")
    # Foreign code: whatever it raises is the finding.
    except Exception as error:
        return Failure(f"raised {type(error).__name__}: {error}", fault=f"raises {type(error).__name__}")
    return None


@st.composite
def cases(draw: st.DrawFn, plan: Plan, like: Case) -> Case:
    """Draw a case that the declaration covers, in the mode of another."""
    mode = like.mode
    page = draw(st.sampled_from(plan.pages))
    edges = st.sampled_from([n for n in (1, page - 1, page, page + 1, 2 * page) if 0 < n <= LONGEST])
    lengths = st.one_of(st.integers(0, LONGEST), edges)
    count = draw(st.integers(1, 5))
    width = draw(st.integers(1, 9))
    prefix = tuple(draw(lengths) for _ in range(count))
    if mode is ForwardMode.DECODE:
        queries: tuple[int, ...] = (1,) * count
    elif mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND):
        queries = (width,) * count
    else:
        queries = tuple(max(1, draw(lengths)) for _ in range(count))
    drawn = like.replace(
        check="shape",
        arg="",
        queries=queries,
        prefix=prefix,
        page=page,
        layers=(draw(layers(plan, mode)),),
        layout=draw(st.sampled_from(plan.layouts)),
        dtype=draw(st.sampled_from(plan.dtypes[:2])),
        lse=plan.has(Feature.LSE) and draw(st.booleans()),
        save=draw(st.sampled_from((True, True, False))),
        place=draw(st.sampled_from(("", "run", "reversed", "shared"))),
        seed=draw(st.integers(0, 3)),
    )
    if drawn.dtype not in plan.spec.kv_dtypes:
        drawn = drawn.replace(dtype=plan.dtype)
    return drawn if shared_prefix(drawn) or drawn.place != "shared" else drawn.replace(place="")


@st.composite
def layers(draw: st.DrawFn, plan: Plan, mode: ForwardMode) -> LayerCase:
    """Draw a layer that the declaration covers."""
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    group = draw(st.sampled_from(plan.groups[:5]))
    changes: dict[str, Any] = {"heads": kv_heads * group, "kv_heads": kv_heads}
    if plan.head_dims:
        changes["dim"] = draw(st.sampled_from(plan.head_dims[:4]))
    if plan.has(Feature.SLIDING_WINDOW) and mode is not ForwardMode.DLLM_EXTEND and draw(st.booleans()):
        changes["window"] = draw(st.integers(0, 40))
    if plan.has(Feature.SOFTCAP) and draw(st.booleans()):
        changes["cap"] = draw(st.sampled_from((2.0, 4.0, 20.0)))
    if plan.has(Feature.SINKS) and draw(st.booleans()):
        changes["sinks"] = True
    return plan.layer(**changes)
