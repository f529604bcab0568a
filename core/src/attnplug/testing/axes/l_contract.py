"""Axis L: what a backend is, beside what it computes: pure to describe, honest in its answers, alone in its state."""

from __future__ import annotations

from collections.abc import Iterator

from ...modes import ForwardMode
from ...spec import Feature
from ..case import Case
from ..plan import Plan
from .axis import Axis, Check
from .l_checks import (
    announcement,
    answers,
    dispatch,
    entries_agree,
    instances,
    members,
    replanned,
    snapshot_restores,
    spec_is_pure,
)


def _cases(plan: Plan) -> Iterator[Case]:
    modes = [mode for mode in plan.modes if not mode.is_target_verify or plan.has(Feature.CHAIN_VERIFY)]
    for check in ("spec_is_pure", "announcement", "members", "answers"):
        yield plan.case("L", check, (modes or [ForwardMode.IDLE])[0])
    if not plan.softmax:
        return
    layer = plan.layer(window=9) if plan.has(Feature.SLIDING_WINDOW) else plan.layer()
    for mode in modes:
        for check in ("entries_agree", "dispatch", "snapshot_restores", "replanned", "instances"):
            yield plan.case("L", check, mode, layers=(plan.layer(), layer))


AXIS = Axis(
    "L",
    "contract",
    _cases,
    {
        "spec_is_pure": Check(
            "the spec is read in a fresh interpreter without torch or any kernel library", spec_is_pure
        ),
        "announcement": Check(
            "both entry points are one distribution's, and what is made carries the announced spec", announcement
        ),
        "members": Check("what a backend overrides takes what the contract passes", members),
        "answers": Check("every declaration has an answer of its type, for every mode", answers),
        "entries_agree": Check("the eager entry is the out-of-graph part, then the in-graph part", entries_agree),
        "dispatch": Check("forward is the forward of the mode", dispatch),
        "snapshot_restores": Check(
            "a step's metadata can be put back, and its layers then give what they gave", snapshot_restores
        ),
        "replanned": Check("a step leaves nothing behind that another step sees", replanned),
        "instances": Check("two backends in a process share no state", instances),
    },
)
