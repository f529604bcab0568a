"""The scheduler alone: orders, budgets, and that nothing is lost."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug.modes import ForwardMode
from attnplug_transformers.pages import PageAllocator, RequestTable
from attnplug_transformers.request import EngineRequest
from attnplug_transformers.sampling import SamplingParams
from attnplug_transformers.scheduler import Scheduler, SchedulerLimits


def scheduler(*, batch=4, tokens=64, chunk=16, pages=32, page_size=4, mixed=True):
    limits = SchedulerLimits(max_batch_size=batch, max_num_tokens=tokens, chunk_size=chunk, mixed=mixed)
    return Scheduler(
        limits, PageAllocator(pages, page_size), RequestTable(batch, pages * page_size, page_size, torch.device("cpu"))
    )


def request(request_id, length, new=4):
    return EngineRequest(
        request_id=request_id,
        prompt=tuple(range(length)),
        max_new_tokens=new,
        params=SamplingParams(),
        end_ids=frozenset(),
        max_len=10_000,
    )


def run(plan, scheduler):
    """Do what a step would: compute the rows and give each sampled one a token."""
    for row in plan.rows:
        samples = row.samples
        row.request.num_computed += row.num_tokens
        if samples:
            row.request.append(0)
            if row.request.finish_reason:
                scheduler.finish(row.request, row.request.finish_reason)


def shape(plan):
    return plan.mode.value, [(row.request.request_id, row.start, row.num_tokens) for row in plan.rows]


def test_prompts_are_taken_in_order_by_chunks_beside_decoding():
    one = scheduler()
    for i, length in enumerate((10, 20, 3)):
        one.add(request(i, length))
    steps = []
    for _ in range(3):
        plan = one.schedule()
        steps.append(shape(plan))
        run(plan, one)
    assert steps == [
        ("extend", [(0, 0, 10), (1, 0, 6)]),
        ("mixed", [(0, 10, 1), (1, 6, 14), (2, 0, 2)]),
        ("mixed", [(0, 11, 1), (1, 20, 1), (2, 2, 1)]),
    ]


def test_without_mixed_steps_decoding_and_prompts_take_turns():
    one = scheduler(mixed=False, chunk=4)
    one.add(request(0, 4, new=8))
    one.add(request(1, 12))
    modes = []
    for _ in range(7):
        plan = one.schedule()
        modes.append(plan.mode)
        run(plan, one)
    extend, decode = ForwardMode.EXTEND, ForwardMode.DECODE
    assert modes == [extend, decode, extend, decode, extend, decode, extend]


def test_the_latest_gives_way_and_comes_back_first():
    one = scheduler(pages=8, page_size=1, batch=3)
    for i in range(3):
        one.add(request(i, 2, new=6))
    preempted = []
    while one.has_work:
        before = list(one.running)
        run(one.schedule(), one)
        preempted += [r.request_id for r in before if r in one.waiting]
        assert not one.take_failed()
    assert preempted
    assert preempted[0] == 2 or preempted[0] == max(preempted)
    assert one.pages.num_free == 8


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    news=st.integers(1, 12),
    pages=st.integers(8, 24),
    page_size=st.sampled_from([1, 4]),
    batch=st.integers(1, 4),
    chunk=st.integers(1, 40),
    mixed=st.booleans(),
)
def test_every_request_ends_and_budgets_hold(lengths, news, pages, page_size, batch, chunk, mixed):
    tokens = 32
    one = scheduler(batch=batch, tokens=tokens, chunk=min(chunk, tokens), pages=pages, page_size=page_size, mixed=mixed)
    requests = [request(i, n, new=news) for i, n in enumerate(lengths) if -(-(n + 1) // page_size) <= pages]
    for each in requests:
        one.add(each)
    for _ in range(4000):
        if not one.has_work:
            break
        plan = one.schedule()
        failed = one.take_failed()
        assert plan.rows or failed, "a step without progress"
        assert len(plan.rows) <= batch
        assert sum(row.num_tokens for row in plan.rows) <= tokens
        assert all(row.num_tokens >= 1 for row in plan.rows)
        held = [page for each in one.running for page in each.pages]
        assert len(held) == len(set(held)) == pages - one.pages.num_free
        assert 0 not in held
        for row in plan.rows:
            assert len(row.request.pages) * page_size >= row.start + row.num_tokens
            slots = one.table.host[row.request.row, : row.start + row.num_tokens].tolist()
            want = [row.request.pages[p // page_size] * page_size + p % page_size for p in range(len(slots))]
            assert slots == want
        if not mixed:
            assert plan.mode is not ForwardMode.MIXED
        run(plan, one)
    assert not one.has_work
    assert one.pages.num_free == pages
    for each in requests:
        assert each.finish_reason == "length" or (each.finish_reason == "error" and "pages" in each.error)
        if each.finish_reason == "error":
            assert len(each.tokens) > pages * page_size - page_size
