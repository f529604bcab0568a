"""Axis I: long contexts, and slots whose offsets do not fit 31 bits."""

from __future__ import annotations

from collections.abc import Iterator

from ...modes import ForwardMode
from ...spec import Kind
from ..bench import Bench
from ..case import Case
from ..plan import Plan, Profile
from ..results import NotRun
from ..subject import Subject
from ..world import OFFSET_LIMIT
from .a_semantics import mla_cases
from .axis import Axis, Check, Outcome, oracle_check

LONG = 131072
"""The context that models of today are served with."""


def _cases(plan: Plan) -> Iterator[Case]:
    longest = min(LONG, plan.spec.max_context_len or LONG)
    if plan.softmax:
        group = plan.groups[0]
        # One KV head: the length is what is tried, and a CPU must do it in seconds.
        layer = plan.layer(heads=group, kv_heads=1)
        if ForwardMode.DECODE in plan.modes:
            prefix = (longest - 1, 5)
            yield plan.case("I", "long_context", ForwardMode.DECODE, layer, queries=(1, 1), prefix=prefix)
        if ForwardMode.EXTEND in plan.modes:
            fields = {"queries": (9, 4), "prefix": (longest - 9, 0)}
            yield plan.case("I", "long_context", ForwardMode.EXTEND, layer, **fields)
            if plan.profile >= Profile.GPU:
                fields = {"queries": (600, 300), "prefix": (30000, 70)}
                yield plan.case("I", "long_context", ForwardMode.EXTEND, layer, **fields)
        for mode in (ForwardMode.DECODE, ForwardMode.EXTEND):
            if mode in plan.modes:
                # Wide rows need fewer slots, and so smaller tables, for the same offset.
                dim = max(plan.head_dims or (plan.layer().dim,))
                wide = plan.layer(dim=dim, heads=8 * group, kv_heads=8)
                yield plan.case("I", "wide_offsets", mode, wide, dtype=_half(plan), kv_dtype="", high=True)
    if Kind.MLA in plan.spec.kinds:
        for case in mla_cases(plan, "I", "wide_offsets", dtype=_half(plan), kv_dtype="", high=True):
            if case.mla == "absorbed" and case.mode is ForwardMode.DECODE:
                yield case


def _half(plan: Plan) -> str:
    """Return the narrowest dtype that pool and model share, so that the pool fits."""
    shared = [d for d in ("bfloat16", "float16", "float32") if d in plan.spec.dtypes and d in plan.spec.kv_dtypes]
    return shared[0] if shared else plan.dtype


def _wide_offsets(subject: Subject, case: Case) -> Outcome:
    """Place the requests at the pool's end, where slot · row stride exceeds 2³¹."""
    layer = case.layers[0]
    size = {"bfloat16": 2, "float16": 2}.get(case.pool_dtype, 4)
    buffers = 1 if layer.kind is Kind.MLA else 2
    needed, free = int(1.2 * OFFSET_LIMIT * size * buffers), Plan(subject).free_memory()
    if free < needed:
        raise NotRun(
            f"offsets beyond 2³¹ need {needed >> 30} GiB of pool; {free >> 30} GiB are free on {subject.device}"
        )
    bench = Bench(subject, case)
    bench.prove()
    return Outcome(served_by=bench.served_by)


AXIS = Axis(
    "I",
    "widths",
    _cases,
    {
        "long_context": oracle_check("a context of 128k positions, or the longest declared, is read whole"),
        "wide_offsets": Check("slots are addressed in 64 bits: slot · row stride may exceed 2³¹", _wide_offsets),
    },
)
