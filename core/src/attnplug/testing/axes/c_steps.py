"""Checks of axis C that run several steps over one world: what one step stores, the next one reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...attention_io import AttentionOutput
from ...batch import ForwardBatch
from ...errors import BackendRejected
from ...modes import ForwardMode
from ..bench import Bench
from ..case import Case
from ..monitor import PoolWatch
from ..poison import nan_empty
from ..results import Failure, Status
from ..step import Span, Step, case_spans, layer_inputs
from ..subject import Subject
from ..trees import draw_trees
from .axis import Outcome


def chunked(subject: Subject, case: Case) -> Outcome:
    """Prefill in chunks of ``arg`` tokens; each chunk's rows are the oracle's of the whole."""
    bench, chunk = Bench(subject, case), int(case.arg)
    spans = case_spans(bench.world)
    for start in range(0, max(case.queries), chunk):
        part = tuple(
            Span(s.request, s.start + start, min(s.start + start + chunk, s.stop))
            for s in spans
            if s.start + start < s.stop
        )
        bench.prove(bench.step(spans=part))
    return Outcome(served_by=bench.served_by)


def generate(subject: Subject, case: Case) -> Outcome:
    """Prefill all but ``arg`` tokens, then decode them one by one."""
    bench, tail = Bench(subject, case), int(case.arg)
    spans = case_spans(bench.world)
    bench.prove(bench.step(spans=tuple(Span(s.request, s.start, s.stop - tail) for s in spans)))
    for back in range(tail, 0, -1):
        # The order of requests changes from step to step, as it does in a server.
        turn = back % len(spans)
        order = (*spans[turn:], *spans[:turn])
        part = tuple(Span(s.request, s.stop - back, s.stop - back + 1) for s in order)
        bench.prove(bench.step(mode=ForwardMode.DECODE, spans=part))
    return Outcome(served_by=bench.served_by)


def sliced(subject: Subject, case: Case) -> Outcome:
    """Run the whole, then each part of it, as sub-batches that are views of it."""
    bench = Bench(subject, case)
    whole = bench.step()
    bench.prove(whole)
    for start, stop in _cuts(len(whole.spans)):
        bench.prove(cut_step(whole, start, stop))
    return Outcome(served_by=bench.served_by)


def cut_step(step: Step, start: int, stop: int) -> Step:
    """Return requests ``start … stop`` of a step as views."""
    return Step(
        step.mode,
        step.spans[start:stop],
        step.batch.slice(start, stop),
        step.trees[start:stop],
        step.brings_encoder,
    )


def _cuts(count: int) -> Sequence[tuple[int, int]]:
    middle = max(1, count // 2)
    return ((0, middle), (middle, count)) if count > 1 else ((0, 1),)


def mixed_parts(subject: Subject, case: Case) -> Outcome:
    """Run the mixed step, then the same rows as an extend and a decode step."""
    bench = Bench(subject, case)
    bench.prove()
    spans = case_spans(bench.world)
    one = tuple(s for s in spans if s.stop - s.start == 1 and s.start)
    many = tuple(s for s in spans if s not in one)
    bench.prove(bench.step(mode=ForwardMode.DECODE, spans=one))
    bench.prove(bench.step(mode=ForwardMode.EXTEND, spans=many))
    return Outcome(served_by=bench.served_by)


def split_prefill(subject: Subject, case: Case) -> Outcome:
    """Run the first layer, then plan again and run the rest, last layer first."""
    bench = Bench(subject, case)
    bench.prove(bench.step(), layers=[0])
    rest = list(range(len(case.layers) - 1, 0, -1))
    bench.prove(bench.step(), layers=rest)
    return Outcome(served_by=bench.served_by)


def empty_request(subject: Subject, case: Case) -> Outcome:
    """Run a batch of which one request has no query."""
    bench = Bench(subject, case)
    bench.prove()
    return Outcome(served_by=bench.served_by)


def idle(subject: Subject, case: Case) -> Outcome:
    """Run a step without requests, or with rows that only join collectives."""
    # The world of one small request: an idle step reads nothing of it.
    there = case.replace(queries=(2,), prefix=(3,), mode=ForwardMode.EXTEND, pad=max(case.pad, 1))
    bench = Bench(subject, there)
    batch = _idle_batch(bench, case.pad)
    layer = bench.world.layers[0]
    lend = layer_inputs(bench.world, Step(ForwardMode.EXTEND, case_spans(bench.world), bench.step().batch), 0)
    assert lend.k is not None
    assert lend.v is not None
    rows = case.pad
    q, k, v = (x[:1].expand(rows, *x.shape[1:]).contiguous() for x in (lend.q, lend.k, lend.v))
    watch = PoolWatch(bench.world)
    with nan_empty():
        bench.backend.init_forward_metadata(batch)
    extras = None
    if case.lse:
        from ...attention_io import AttentionExtras

        extras = AttentionExtras(return_lse=True)
    with nan_empty():
        got = bench.backend.forward(q, k, v, layer, batch, True, extras)
    bench.synchronise()
    watch.verify(Step(ForwardMode.IDLE, (), batch), None, saved=False)
    shape = (rows, layer.num_heads, layer.v_head_dim)
    if tuple(got.out.shape) not in (shape, (rows, shape[1] * shape[2])) or got.out.dtype != q.dtype:
        raise Failure(f"idle out is {tuple(got.out.shape)} {got.out.dtype}; must be {shape} {q.dtype}", fault="idle")
    if bool((got.out != 0).any()):
        raise Failure("idle rows are not zeros", fault="idle")
    if case.lse and (got.lse is None or not bool(torch.isneginf(got.lse).all())):
        raise Failure("idle lse must be −inf", fault="idle")
    return Outcome(served_by=subject.name)


def _idle_batch(bench: Bench, rows: int) -> ForwardBatch:
    device = bench.world.device
    zeros = torch.zeros(rows, dtype=torch.int64, device=device)
    return ForwardBatch(
        forward_mode=ForwardMode.IDLE,
        batch_size=rows,
        num_padding=rows,
        req_pool_indices=zeros,
        seq_lens=zeros.clone(),
        seq_lens_cpu=torch.zeros(rows, dtype=torch.int64),
        seq_lens_sum=0,
        max_seq_len=0,
        positions=zeros.clone(),
        out_cache_loc=zeros.clone(),
        kv_loc_plan=bench.world.translator.plan(req_pool_indices=zeros, out_cache_loc=zeros),
    )


def tree_after_plan(subject: Subject, case: Case) -> Outcome:
    """Plan with one tree in the mask, fill another in place, announce it, and run."""
    bench = Bench(subject, case)
    first = bench.step()
    info = first.batch.spec_info
    assert info is not None
    assert info.mask is not None
    bench.backend.init_forward_metadata(first.batch)
    trees, _ = draw_trees(case.replace(seed=case.seed + 1), bench.world.device)
    second = bench.refill(first, trees)
    outputs = bench.run(second, plan=False)
    try:
        bench.check(second, outputs)
    except Failure as failure:
        if not _is_right(bench, first, outputs):
            raise
        raise Failure(
            f"{failure}; it is right for the tree that the mask held at planning: what "
            "update_verify_buffers_to_fill_after_draft announces was not read",
            fault="tree of planning time",
        ) from failure
    return Outcome(served_by=bench.served_by)


def _is_right(bench: Bench, step: Step, outputs: Sequence[AttentionOutput]) -> bool:
    try:
        bench.check(step, outputs)
    except Failure:
        return False
    return True


BOUND_SLACK = 5
"""How much longer than its request a bound is: past the end of a short page, within the table's room."""


def upper_bounds(subject: Subject, case: Case) -> Outcome:
    """Run a step whose host lengths are upper bounds: the result is the same, or the step is refused."""
    bench = Bench(subject, case)
    step = bench.step()
    batch, host = step.batch, step.batch.seq_lens_cpu
    assert host is not None, "a step of the suite has a mirror"
    bounds = host + BOUND_SLACK
    most = {"seq_lens_sum": int(bounds.sum()), "max_seq_len": int(bounds.max())}
    loose = replace(step, batch=batch.replace(seq_lens_cpu=bounds, seq_lens_cpu_exact=False, **most))
    try:
        bench.prove(loose)
    except BackendRejected as error:
        return Outcome(Status.REFUSED, subject.name, str(error).replace("\n", ";"))
    # Foreign code that reads too far may end in any error.
    except Exception as error:
        raise Failure(
            f"seq_lens_cpu is {BOUND_SLACK} more than seq_lens, and seq_lens_cpu_exact is False: {error}",
            fault="takes an upper bound for a length",
        ) from error
    return Outcome(served_by=bench.served_by)


def encoder_mirror(subject: Subject, case: Case) -> Outcome:
    """Run a step whose encoder lengths only the device knows: the result is the same, or the step is refused."""
    bench = Bench(subject, case)
    step = bench.step()
    try:
        bench.prove(replace(step, batch=step.batch.replace(encoder_lens_cpu=None)))
    except BackendRejected as error:
        return Outcome(Status.REFUSED, subject.name, str(error).replace("\n", ";"))
    # Foreign code: reading None may end in any error.
    except Exception as error:
        raise Failure(
            f"encoder_lens_cpu is None, as the contract allows: {type(error).__name__}: {error}",
            fault="needs the host's encoder lengths, and does not refuse",
        ) from error
    return Outcome(served_by=bench.served_by)


def no_mirror(subject: Subject, case: Case) -> Outcome:
    """Run a step without host lengths, which the declaration says are not read."""
    bench = Bench(subject, case)
    step = bench.step()
    bare = step.batch.replace(
        seq_lens_cpu=None, seq_lens_cpu_exact=False, max_seq_len=bench.world.env.limits.max_context_len
    )
    try:
        bench.prove(replace(step, batch=bare))
    # Foreign code: reading None may end in any error.
    except Exception as error:
        raise Failure(
            f"needs_cpu_seq_lens is False, and without seq_lens_cpu: {type(error).__name__}: {error}",
            fault="reads the host's lengths, undeclared",
        ) from error
    return Outcome(served_by=bench.served_by)
