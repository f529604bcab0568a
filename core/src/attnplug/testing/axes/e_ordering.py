"""Axis E: what the scheduler may overwrite, and when; steps given back to back without a wait between them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...attention_io import AttentionOutput
from ...context import ForwardContext, forward_context
from ...errors import ContractViolation
from ...graphs.overlap import ReadEndFence
from ...modes import ForwardMode, SharedReadEnds
from ..bench import Bench
from ..case import Case
from ..graph_bench import GraphBench
from ..plan import Plan
from ..results import Failure
from ..step import Step, case_spans, layer_inputs
from ..subject import Subject
from .axis import Axis, Check, Outcome
from .d_graphs import graph_case, graph_kinds, guarded, steps_of

SLEEP_CYCLES = 20_000_000
"""Some 10 ms of a GPU's clock: longer than any preparation."""


class Scheduler:
    """Overwrites what it shares with a step as soon as the step's fence says it may."""

    def __init__(self, bench: Bench) -> None:
        self._tables = [t for t in (bench.world.table, bench.world.encoder_table) if t is not None]
        self._kept = [t.clone() for t in self._tables]
        self.reached: SharedReadEnds | None = None

    def __call__(self, point: SharedReadEnds) -> None:
        self.reached = point
        for table in self._tables:
            # The sink: a legal slot, and never a request's.
            table.fill_(0)

    def restore(self) -> None:
        """Put the tables back, for the next step."""
        for table, kept in zip(self._tables, self._kept, strict=True):
            table.copy_(kept)


def _too_early(end: SharedReadEnds, failure: Failure) -> Failure:
    return Failure(
        f"{failure}; the request table was overwritten at {end.name}, where this backend says that its reads end",
        fault=f"reads shared tensors after {end.name}",
    )


def eager_read_end(subject: Subject, case: Case) -> Outcome:
    """Run the case's step eagerly and overwrite the tables at the declared point of it."""
    bench = Bench(subject, case)
    step, scheduler = bench.step(), Scheduler(bench)
    fence = ReadEndFence(bench.world.device, on_read_end=scheduler)
    end = bench.backend.shared_read_ends(case.mode)
    fence.arm_eager(end)
    batch = step.batch
    bench.backend.check_batch(batch)
    bench.backend.init_forward_metadata_out_graph(batch)
    fence.reached(SharedReadEnds.PRE_REPLAY)
    bench.backend.init_forward_metadata_in_graph(batch)
    fence.reached(SharedReadEnds.IN_REPLAY)
    outputs = [bench.call(step, i, layer_inputs(bench.world, step, i)) for i in range(len(bench.world.layers))]
    fence.reached(SharedReadEnds.POST_REPLAY)
    _check(bench, step, outputs, end)
    return Outcome(served_by=bench.served_by, message=f"reads end at {end.name}")


def graph_read_end(subject: Subject, case: Case) -> Outcome:
    """Replay steps, and overwrite the tables at the declared point of each."""
    scheduler: Scheduler | None = None
    serving = False

    def overwrite(point: SharedReadEnds) -> None:
        if serving and scheduler is not None:
            scheduler(point)

    bench = GraphBench(subject, case, fence=ReadEndFence(subject.device, on_read_end=overwrite))
    scheduler = Scheduler(bench)
    end = bench.backend.shared_read_ends(case.mode)
    try:
        for index, step in enumerate(steps_of(bench)):
            if index == 0:
                bench.capture(step)
                serving = True
            outputs = [AttentionOutput(out.clone()) for out in bench.replay(step)]
            bench.synchronise()
            _check(bench, step, outputs, end)
            scheduler.restore()
    except ContractViolation as error:
        raise guarded(error) from error
    return Outcome(served_by=bench.served_by, message=f"reads end at {end.name}")


def _check(bench: Bench, step: Step, outputs: list[AttentionOutput], end: SharedReadEnds) -> None:
    try:
        bench.check(step, outputs)
    except Failure as failure:
        raise _too_early(end, failure) from failure


def back_to_back(subject: Subject, case: Case) -> Outcome:
    """Plan and run two steps behind work that delays the device, and look at both only then."""
    bench = Bench(subject, case)
    whole = case_spans(bench.world)
    steps = [bench.step(spans=whole), bench.step(spans=tuple(reversed(whole)))]
    inputs = [[layer_inputs(bench.world, step, i) for i in range(len(bench.world.layers))] for step in steps]
    if bench.world.device.type == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    got: list[list[AttentionOutput]] = []
    for step, values in zip(steps, inputs, strict=True):
        with torch.no_grad(), forward_context(ForwardContext(bench.backend, batch=step.batch)):
            bench.backend.init_forward_metadata(step.batch)
            outs = [
                layer(one.q, one.k, one.v, step.batch, True, one.extras)
                for layer, one in zip(bench.world.layers, values, strict=True)
            ]
        got.append([AttentionOutput(one.out.clone()) for one in outs])
    bench.synchronise()
    for name, step, outputs in zip(("first", "second"), steps, got, strict=True):
        try:
            bench.check(step, outputs)
        except Failure as failure:
            raise Failure(
                f"the {name} of two steps given back to back is wrong: {failure}",
                fault="a plan overwrites what an earlier step still reads",
            ) from failure
    return Outcome(served_by=subject.name)


def _cases(plan: Plan) -> Iterator[Case]:
    if not plan.softmax:
        return
    for mode in plan.modes:
        for mask in plan.verify_forms()[:1] if mode.is_target_verify else ("",):
            if not mask:
                yield plan.case("E", "eager_read_end", mode)
                yield plan.case("E", "back_to_back", mode)
    for mode, width in graph_kinds(plan):
        yield graph_case(plan, "E", "graph_read_end", mode, width, plan.layer())
    if ForwardMode.EXTEND in plan.modes:
        yield graph_case(plan, "E", "graph_read_end", ForwardMode.EXTEND, 1, plan.layer())


AXIS = Axis(
    "E",
    "ordering",
    _cases,
    {
        "eager_read_end": Check("nothing shared is read after the declared read end", eager_read_end),
        "graph_read_end": Check("nothing shared is read after the declared read end of a replay", graph_read_end),
        "back_to_back": Check("two steps given without a wait between them are both right", back_to_back),
    },
)
