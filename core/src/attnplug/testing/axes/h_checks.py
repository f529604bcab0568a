"""Checks of axis H that one comparison with the oracle does not make."""

from __future__ import annotations

import torch

from ...errors import BackendRejected
from ...merge import apply_sink, merge_state
from ..bench import Bench
from ..budget import allowed_error
from ..case import Case
from ..data import raw_bytes
from ..expected import problems, true_rules
from ..monitor import same_bytes
from ..oracle import attend
from ..results import Failure, Status
from ..step import Span, case_spans
from ..subject import Subject
from .axis import Outcome, against_oracle
from .c_steps import cut_step


def dtype_pair(subject: Subject, case: Case) -> Outcome:
    """Compare with the oracle; a declaration cannot exclude a pair, so a reasoned refusal will do."""
    try:
        return against_oracle(subject, case)
    except BackendRejected as error:
        return Outcome(Status.REFUSED, subject.name, str(error).replace("\n", ";"))


def saturate(subject: Subject, case: Case) -> Outcome:
    """Store rows that are too large, and look at the pool; what attention makes of them is not asked."""
    bench = Bench(subject, case)
    data, world = bench.world.data[0], bench.world
    limit = torch.finfo(world.kv_dtype).max
    for b, prefix in enumerate(case.prefix):
        for name in ("k", "v"):
            rows = getattr(data, name)[b]
            rows[prefix:] = (rows[prefix:].float() * 4.0 * limit).clamp(-60000.0, 60000.0).to(rows.dtype)
            units = getattr(data, f"{name}_units")[b]
            clamped = rows[prefix:].float().clamp(-limit, limit).to(units.dtype)
            raw_bytes(units)[prefix:] = raw_bytes(clamped)
    bench.run(bench.step())
    return Outcome(served_by=bench.served_by)


def merged_halves(subject: Subject, case: Case) -> Outcome:
    """Two requests stand for two halves of one: the same query over each, merged by their LSE."""
    bench = Bench(subject, case)
    world, data = bench.world, bench.world.data[0]
    data.q[1] = data.q[0].clone()
    step = bench.step()
    got = bench.prove(step, lse=True)[0]
    assert got.lse is not None
    merged = merge_state(got.out[:1], got.lse[:1], got.out[1:2], got.lse[1:2])
    out, sinks = merged.out, data.sinks
    if sinks is not None:
        out = apply_sink(out, merged.lse, sinks)
    first, second = problems(world, step, 0)
    whole = first._replace(
        k=torch.cat([first.k, second.k]),
        v=torch.cat([first.v, second.v]),
        k_pos=torch.arange(first.k.shape[0] + second.k.shape[0], device=first.k.device),
        q_pos=torch.full_like(first.q_pos, first.k.shape[0] + second.k.shape[0] - 1),
    )
    rules = true_rules(world, step, 0, lse=False)
    true = attend(whole, rules, None if sinks is None else sinks.double())
    allowed = allowed_error([whole], rules, sinks, true, world.dtype)
    error = (out.double() - true.out).abs().amax(dim=-1)
    if bool((error > allowed.out).any()):
        raise Failure(
            f"the merged state is off by {float(error.max()):.3g}, allowed {float(allowed.out.max()):.3g}",
            fault="states do not merge",
        )
    return Outcome(served_by=bench.served_by)


def batch_invariance(subject: Subject, case: Case) -> Outcome:
    """Run the batch, each request alone, and the batch in another order; compare bits."""
    bench = Bench(subject, case, deterministic=True)
    whole = bench.step()
    together = bench.prove(whole)[0].out
    spans, start = case_spans(bench.world), 0
    for i, span in enumerate(spans):
        count = span.stop - span.start
        alone = bench.run(cut_step(whole, i, i + 1))[0].out
        _same(together[start : start + count], alone, f"request {i} alone")
        start += count
    if case.mask:
        return Outcome(served_by=bench.served_by)
    turned: tuple[Span, ...] = spans[::-1]
    backwards = bench.run(bench.step(spans=turned))[0].out
    pieces = torch.split(backwards, [span.stop - span.start for span in turned])[::-1]
    _same(together, torch.cat(pieces), "requests in reverse order")
    return Outcome(served_by=bench.served_by)


def _same(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    if not same_bytes(a, b):
        gap = float((a.double() - b.double()).abs().max())
        raise Failure(
            f"{what}: the result differs by {gap:.3g}; DETERMINISTIC is declared", fault="depends on the batch"
        )
