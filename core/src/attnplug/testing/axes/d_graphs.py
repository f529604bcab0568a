"""Axis D: a replay is what an eager step is, for other lengths, smaller and larger batches, and padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...errors import ContractViolation
from ...modes import ForwardMode, GraphLevel
from ...spec import Feature
from ..case import Case, LayerCase
from ..graph_bench import GraphBench, step_width
from ..plan import Plan
from ..results import Failure
from ..step import Span, Step
from ..subject import WRAPPERS, Subject
from .axis import Axis, Check, Outcome

ROUNDS = ((0, 1, 2, 3), (1, 3), (3, 2, 1, 0), (2,), (0, 2, 3), (1, 0, 3, 2))
"""Requests of each step: smaller after larger, other orders, sizes that are padded and sizes that are not."""
VERIFY_WIDTH = 3
TREE_WIDTH = 4
_PREFIX = (0, 7, 30, 70)


def spread(bench: GraphBench) -> Iterator[Step]:
    """Yield steps that advance the case's requests, as a server would schedule them."""
    width = step_width(bench.case)
    at = list(bench.case.prefix)
    for requests in ROUNDS:
        spans = tuple(Span(b, at[b], at[b] + width) for b in requests)
        for b in requests:
            at[b] += width
        # A tree is filled in as its step is made, and each step is made when the one before was replayed.
        yield bench.step(mode=bench.case.mode, spans=spans, **(bench.tree(spans) if bench.case.mask else {}))


def chunks(bench: GraphBench) -> Iterator[Step]:
    """Yield prefill chunks of unequal lengths, one to all requests a step."""
    at = list(bench.case.prefix)
    for turn, requests in enumerate(ROUNDS):
        spans = tuple(Span(b, at[b], at[b] + 1 + (turn + 2 * i) % 5) for i, b in enumerate(requests))
        for span in spans:
            at[span.request] = span.stop
        yield bench.step(mode=bench.case.mode, spans=spans)


def steps_of(bench: GraphBench) -> Iterator[Step]:
    """Yield the case's steps."""
    return chunks(bench) if bench.case.mode.is_extend else spread(bench)


def guarded(error: ContractViolation) -> Failure:
    """Return a violation that a runner or the lint raised as a failure, named by its kind."""
    text = str(error)
    for sign, fault in (
        ("in a captured region", "synchronises or depends on data in the graph"),
        ("metadata moved", "metadata moved between capture and replay"),
        ("synchronised with the host", "a replay synchronises"),
        ("allocated", "a replay allocates"),
        ("captured preparation", "a host value is baked into the glue graph"),
    ):
        if sign in text:
            return Failure(text, fault=fault)
    return Failure(text, fault="breaks the graph contract")


def replay(subject: Subject, case: Case) -> Outcome:
    """Capture at the first step, then replay every step."""
    bench = GraphBench(subject, case)
    try:
        for index, step in enumerate(steps_of(bench)):
            if index == 0:
                bench.capture(step)
            bench.prove_replay(step)
    except ContractViolation as error:
        raise guarded(error) from error
    return Outcome(served_by=bench.served_by)


def recapture(subject: Subject, case: Case) -> Outcome:
    """Capture, replay, and capture again over buffers that steps have filled; then replay that."""
    bench = GraphBench(subject, case)
    steps = list(steps_of(bench))
    try:
        bench.capture(steps[0])
        for step in steps[:3]:
            bench.prove_replay(step)
        bench.runner = bench.new_runner()
        bench.capture(steps[3])
        for step in steps[3:]:
            bench.prove_replay(step)
    except ContractViolation as error:
        raise guarded(error) from error
    return Outcome(served_by=bench.served_by)


def glue(subject: Subject, case: Case) -> Outcome:
    """Replay with metadata preparation captured too, or hear the reason why not."""
    bench = GraphBench(subject, case)
    reason = bench.backend.metadata_capture_refusal(case.mode)
    if reason:
        return Outcome(message=f"prepared eagerly: {reason}")
    bench.runner = bench.new_runner(glue=True)
    try:
        # Twice over, so that each bucket's preparation gets past its warm-ups.
        for step in (*spread(bench), *spread(bench)):
            if not bench.served_by:
                bench.capture(step)
            bench.prove_replay(step)
    except ContractViolation as error:
        raise guarded(error) from error
    return Outcome(served_by=bench.served_by)


def graph_kinds(plan: Plan) -> Iterator[tuple[ForwardMode, int]]:
    """Yield the modes, with their widths, that the declared level captures whole."""
    level = plan.spec.graph_level
    if level >= GraphLevel.DECODE and ForwardMode.DECODE in plan.modes:
        yield ForwardMode.DECODE, 1
    chain = ForwardMode.TARGET_VERIFY in plan.modes and plan.has(Feature.CHAIN_VERIFY)
    if level >= GraphLevel.UNIFORM and chain:
        yield ForwardMode.TARGET_VERIFY, VERIFY_WIDTH


def graph_case(
    plan: Plan, axis: str, check: str, mode: ForwardMode, width: int, *layers: LayerCase, **more: Any
) -> Case:
    """Return a case of four requests with room for every round."""
    room = 5 * len(ROUNDS) if mode.is_extend else width * len(ROUNDS)
    arg = str(width) if width > 1 else ""
    return plan.case(axis, check, mode, layers=layers, queries=(room,) * 4, prefix=_PREFIX, arg=arg, **more)


def _cases(plan: Plan) -> Iterator[Case]:
    if not plan.softmax:
        return
    layers = [plan.layer()]
    if plan.has(Feature.SLIDING_WINDOW):
        layers.append(plan.layer(window=9))
    if plan.has(Feature.SINKS):
        layers.append(plan.layer(sinks=True))
    for mode, width in graph_kinds(plan):
        for layer in layers:
            yield graph_case(plan, "D", "replay", mode, width, layer)
        yield graph_case(plan, "D", "recapture", mode, width, layers[-1])
        yield graph_case(plan, "D", "glue", mode, width, layers[0])
        for wrap in WRAPPERS:
            yield graph_case(plan, "D", "replay", mode, width, layers[0], wrap=wrap)
        if plan.has(Feature.SLIDING_WINDOW):
            # What is written last into a shared buffer is right for its own group: either may be the last.
            pair = (plan.layer(), plan.layer(window=9))
            for both in (pair, pair[::-1]):
                yield graph_case(plan, "D", "groups", mode, width, *both)
    yield from _tree_cases(plan)
    if ForwardMode.EXTEND in plan.modes:
        for layer in layers:
            yield graph_case(plan, "D", "replay", ForwardMode.EXTEND, 1, layer)
        yield graph_case(plan, "D", "replay", ForwardMode.EXTEND, 1, layers[0], wrap="two_batch")


def _tree_cases(plan: Plan) -> Iterator[Case]:
    verify = ForwardMode.TARGET_VERIFY
    if verify in plan.modes and plan.has(Feature.CUSTOM_MASK) and plan.spec.graph_level >= GraphLevel.UNIFORM:
        for mask in ("qlen", "full"):
            yield graph_case(plan, "D", "tree", verify, TREE_WIDTH, plan.layer(), mask=mask)


AXIS = Axis(
    "D",
    "graphs",
    _cases,
    {
        "replay": Check("a replay gives what an eager step gives, and writes what it writes", replay),
        "groups": Check("layer groups that differ in window keep their metadata apart in a replay", replay),
        "tree": Check("each replay verifies the tree that its mask holds then", replay),
        "recapture": Check("a capture after steps were served writes only the sink", recapture),
        "glue": Check("captured metadata preparation gives what eager preparation gives", glue),
    },
)
