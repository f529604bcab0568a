"""Checks of axis L."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from ...attention_io import AttentionOutput
from ...backend import AttentionBackend
from ...context import ForwardContext, forward_context
from ...members import MEMBERS
from ...modes import ForwardMode, GraphLevel, SharedReadEnds
from ..bench import Bench
from ..case import Case
from ..monitor import same_bytes
from ..results import Failure, NotRun
from ..step import Step, case_spans, layer_inputs
from ..subject import Subject
from .axis import Outcome


def spec_is_pure(subject: Subject, case: Case) -> Outcome:
    """Import the announced spec in a fresh interpreter, and see what came with it."""
    if not subject.installed:
        raise NotRun("the backend is not installed, so no entry point announces its spec")
    from ..purity import impurities

    found = impurities(subject.name, subject.spec.kernel_modules)
    if found:
        raise Failure("; ".join(found), fault="the spec is not pure")
    return Outcome(served_by=subject.name)


def announcement(subject: Subject, case: Case) -> Outcome:
    """Compare what is announced with what is made."""
    if not subject.installed:
        raise NotRun("the backend is not installed, so no entry point announces it")
    from ...catalog import Catalog

    entry = Catalog().require(subject.name)
    bench = Bench(subject, case)
    leaf = next(iter(bench.backend.leaves()))
    if leaf.spec != entry.spec:
        raise Failure("the backend's spec is not the one that its distribution announces", fault="two specs")
    for point in (entry.spec_entry_point, entry.backend_entry_point):
        if point is None or point.name != subject.name:
            raise Failure(f"entry point {point} does not carry the name {subject.name!r}", fault="two names")
    return Outcome(served_by=subject.name)


def members(subject: Subject, case: Case) -> Outcome:
    """Compare the signatures of what is overridden with the contract's."""
    bench, wrong = Bench(subject, case), []
    for leaf in bench.backend.leaves():
        for name in MEMBERS:
            base, own = getattr(AttentionBackend, name, None), getattr(type(leaf), name, None)
            if own is None or own is base or not callable(base) or not callable(own):
                continue
            problem = _lacks(inspect.signature(base), inspect.signature(own))
            if problem:
                wrong.append(f"{type(leaf).__name__}.{name} {problem}")
    if wrong:
        raise Failure("; ".join(wrong), fault="overrides with another signature")
    return Outcome(served_by=subject.name)


def _lacks(base: inspect.Signature, own: inspect.Signature) -> str:
    """Say how a call that the contract makes would fail."""
    kinds = {parameter.kind for parameter in own.parameters.values()}
    takes_all = inspect.Parameter.VAR_POSITIONAL in kinds and inspect.Parameter.VAR_KEYWORD in kinds
    asked = list(base.parameters)
    missing = [name for name in asked if name not in own.parameters]
    if missing and not takes_all:
        return f"does not take {', '.join(missing)}"
    extra = [
        name
        for name, parameter in own.parameters.items()
        if name not in asked
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    return f"asks for {', '.join(extra)}, which nobody passes" if extra else ""


def answers(subject: Subject, case: Case) -> Outcome:
    """Ask every declaration, and check type and sense."""
    bench = Bench(subject, case)
    backend, spec, wrong = bench.backend, subject.spec, []
    for mode in ForwardMode:
        if not isinstance(backend.shared_read_ends(mode), SharedReadEnds):
            wrong.append(f"shared_read_ends({mode.value}) is no SharedReadEnds")
        if not isinstance(backend.metadata_capture_refusal(mode), str):
            wrong.append(f"metadata_capture_refusal({mode.value}) is no text")
    fill = backend.get_cuda_graph_seq_len_fill_value()
    if not isinstance(fill, int) or fill < 1:
        wrong.append(f"get_cuda_graph_seq_len_fill_value() is {fill!r}; must be a legal length, at least 1")
    if backend.graph_level is not spec.graph_level:
        wrong.append(f"graph_level is {backend.graph_level!r}; the spec says {spec.graph_level!r}")
    if not isinstance(backend.graph_level, GraphLevel):
        wrong.append("graph_level is no GraphLevel")
    if backend.needs_cpu_seq_lens and not spec.needs_cpu_seq_lens:
        wrong.append("needs_cpu_seq_lens is True; the spec says False")
    for leaf in backend.leaves():
        if leaf.kv_index_translator is not bench.world.translator:
            wrong.append(f"{leaf.name}.kv_index_translator is not the environment's")
        if leaf.env is not bench.world.env:
            wrong.append(f"{leaf.name}.env is not the environment that it was made from")
    if wrong:
        raise Failure("; ".join(wrong), fault="declares what it is not")
    return Outcome(served_by=subject.name)


def entries_agree(subject: Subject, case: Case) -> Outcome:
    """Plan by the one entry and by the two parts; compare bits."""
    bench = Bench(subject, case)
    step = bench.step()
    eager = bench.prove(step)
    bench.backend.check_batch(step.batch)
    bench.backend.init_forward_metadata_out_graph(step.batch)
    bench.backend.init_forward_metadata_in_graph(step.batch)
    _same(eager, bench.run(step, plan=False), "the two parts of planning give another result than the eager entry")
    return Outcome(served_by=bench.served_by)


def dispatch(subject: Subject, case: Case) -> Outcome:
    """Call the mode's own forward, and compare with forward."""
    bench = Bench(subject, case)
    step = bench.step()
    whole = bench.prove(step)
    name = "forward_decode" if step.mode is ForwardMode.DECODE else "forward_extend"
    if step.mode is ForwardMode.MIXED and subject.spec.native_mixed:
        name = "forward_mixed"
    direct = []
    for index, layer in enumerate(bench.world.layers):
        inputs = layer_inputs(bench.world, step, index)
        with forward_context(ForwardContext(bench.backend)):
            run = getattr(bench.backend, name)
            direct.append(run(inputs.q, inputs.k, inputs.v, layer, step.batch, True, inputs.extras))
    bench.synchronise()
    _same(whole, direct, f"{name} gives another result than forward")
    return Outcome(served_by=bench.served_by)


def snapshot_restores(subject: Subject, case: Case) -> Outcome:
    """Plan a step, keep its metadata, plan another, put the first back, and run it."""
    bench = Bench(subject, case)
    first = bench.step()
    before = bench.prove(first)
    kept = bench.backend.forward_metadata
    if kept is None:
        raise Failure("forward_metadata is None after a step was planned", fault="no readable metadata")
    second = _other(bench)
    bench.prove(second)
    bench.backend.forward_metadata = kept
    _same(before, bench.run(first, plan=False), "the step's metadata was put back, and the result is another")
    return Outcome(served_by=bench.served_by)


def replanned(subject: Subject, case: Case) -> Outcome:
    """Run a step, a smaller one, and the first again."""
    bench = Bench(subject, case)
    first = bench.step()
    before = bench.prove(first)
    bench.prove(_other(bench))
    _same(before, bench.prove(first), "the same step after another gives another result")
    return Outcome(served_by=bench.served_by)


def instances(subject: Subject, case: Case) -> Outcome:
    """Run a step of each of two backends alone; then plan both, then run both."""
    one, two = Bench(subject, case), Bench(subject, case.replace(seed=case.seed + 5))
    steps = [bench.step() for bench in (one, two)]
    for bench, step in zip((one, two), steps, strict=True):
        bench.prove(step)
    for bench, step in zip((one, two), steps, strict=True):
        bench.backend.init_forward_metadata(step.batch)
    for bench, step in zip((one, two), steps, strict=True):
        try:
            bench.prove(step, plan=False)
        # Right when run alone: whatever goes wrong now is the other instance's doing.
        except Exception as error:
            raise Failure(
                f"right alone, and wrong when another instance plans in between: {type(error).__name__}: {error}",
                fault="instances share state",
            ) from error
    return Outcome(served_by=one.served_by)


def _other(bench: Bench) -> Step:
    """Return a step over fewer requests, in another order."""
    spans = case_spans(bench.world)
    return bench.step(spans=spans[:0:-1])


def _same(a: Sequence[AttentionOutput], b: Sequence[AttentionOutput], what: str) -> None:
    for index, (one, other) in enumerate(zip(a, b, strict=True)):
        if not same_bytes(one.out, other.out):
            gap = float((one.out.double() - other.out.double()).abs().max())
            raise Failure(f"layer {index}: {what}; they differ by {gap:.3g}", fault="state from another step")
