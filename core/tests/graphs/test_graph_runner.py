"""Whole steps from graphs equal eager ones, whatever came before; broken backends are told by name."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch

from attnplug.errors import BatchError, ContractViolation
from attnplug.graphs.full import GraphRunner
from attnplug.graphs.inputs import Rows
from attnplug.graphs.options import EVERY_REPLAY, GraphOptions
from attnplug.graphs.overlap import ReadEndFence
from attnplug.graphs.state import ensure_graph_state
from attnplug.masks.verify import TreeMaskMode, VerifyMask
from attnplug.modes import ForwardMode, GraphLevel, SharedReadEnds
from attnplug.wrappers.hybrid import HybridAttnBackend
from attnplug.wrappers.two_batch import TwoBatchOverlapBackend

from .graph_world import DTYPE, HIDDEN, MAX_BS, GraphWorld
from .table_backend import (
    SPEC,
    InGraphTable,
    ItemInGraph,
    PaddingNotReset,
    RebuiltAtReplay,
    TableBackend,
    TableNotRefreshed,
)

CPU = torch.device("cpu")
DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY


def runner(world: GraphWorld, backend, buckets=(1, 2, 4), width=1, fence=None, **options) -> GraphRunner:
    options.setdefault("pointer_checks", EVERY_REPLAY)
    return GraphRunner(
        world.model,
        backend,
        buckets=buckets,
        device=CPU,
        max_query_width=width,
        options=GraphOptions(**options),
        fence=fence,
    )


def wrapped(world: GraphWorld, how: str):
    if how == "hybrid":
        return HybridAttnBackend(TableBackend(world.env), InGraphTable(world.env))
    if how == "two_batch":
        return TwoBatchOverlapBackend(TableBackend(world.env), InGraphTable(world.env))
    return InGraphTable(world.env) if how == "in_graph" else TableBackend(world.env)


@pytest.mark.parametrize("glue", [False, True], ids=["eager_prep", "glue"])
@pytest.mark.parametrize("how", ["plain", "in_graph", "hybrid", "two_batch"])
def test_replays_equal_a_dense_pass_for_other_lengths_and_smaller_after_larger_batches(how: str, glue: bool) -> None:
    world, rng = GraphWorld(), random.Random(11)
    backend = wrapped(world, how)
    lens = [4, 6, 1, 3, 2, 5]
    world.prefill(backend, lens)
    graphs = runner(world, backend, glue=glue)
    for _ in range(25):
        requests = rng.sample(range(MAX_BS), rng.choice([4, 3, 2, 1]))
        requests = [r for r in requests if lens[r] < 20]
        for r in requests:
            lens[r] += 1
        if not requests:
            break
        now = [lens[r] for r in requests]
        out = graphs.run(*world.step(DECODE, now, [1] * len(now), requests))
        torch.testing.assert_close(out, world.expected(now, [1] * len(now), requests))
    assert graphs.kinds[0].width == 1


def test_a_replay_runs_no_python_of_the_backend_s_layers() -> None:
    world = GraphWorld()
    backend = TableBackend(world.env)
    world.prefill(backend, [4, 6])
    graphs = runner(world, backend)
    graphs.run(*world.step(DECODE, [5, 7], [1, 1]))
    calls = backend.calls
    graphs.run(*world.step(DECODE, [6, 8], [1, 1]))
    assert backend.calls == calls


def test_decode_and_verify_are_kinds_of_one_runner() -> None:
    world = GraphWorld()
    backend = TableBackend(world.env)
    lens = [4, 6, 3]
    world.prefill(backend, lens)
    graphs = runner(world, backend, width=3)
    for step in range(4):
        new = 3 if step % 2 else 1
        lens = [n + new for n in lens]
        mode = VERIFY if new == 3 else DECODE
        out = graphs.run(*world.step(mode, lens, [new] * 3))
        torch.testing.assert_close(out, world.expected(lens, [new] * 3))
    assert {(kind.mode, kind.width) for kind in graphs.kinds} == {(DECODE, 1), (VERIFY, 3)}


def test_padding_writes_only_the_sink_also_at_warm_up_and_capture() -> None:
    world = GraphWorld()
    backend = TableBackend(world.env)
    world.prefill(backend, [4, 6, 3])
    graphs = runner(world, backend, buckets=(4,))
    before = [t.clone() for i in (0, 1) for t in world.pool.get_kv_buffer(i)]
    inputs, batch = world.step(DECODE, [5, 7, 4], [1, 1, 1])
    graphs.capture(inputs, batch)
    after = [t for i in (0, 1) for t in world.pool.get_kv_buffer(i)]
    assert all(torch.equal(a[1:], b[1:]) for a, b in zip(before, after, strict=True))
    graphs.run(inputs, batch)
    changed = (after[0] != before[0]).flatten(1).any(1).nonzero().flatten().tolist()
    assert set(changed) - {0} == set(batch.out_cache_loc.tolist())


def test_an_idle_step_replays_the_smallest_bucket_and_touches_nobody() -> None:
    world = GraphWorld()
    backend = TableBackend(world.env)
    world.prefill(backend, [4, 6])
    graphs = runner(world, backend)
    inputs, batch = world.step(DECODE, [5, 7], [1, 1])
    assert graphs.can_run(batch.slice(0, 0).replace(forward_mode=ForwardMode.IDLE))
    graphs.run(inputs, batch)
    before = [t[1:].clone() for i in (0, 1) for t in world.pool.get_kv_buffer(i)]
    idle = batch.slice(0, 0).replace(forward_mode=ForwardMode.IDLE)
    assert graphs.can_run(idle) == []
    out = graphs.run({}, idle)
    assert out.shape == (0, HIDDEN)
    assert all(
        torch.equal(a, t[1:])
        for a, t in zip(before, [t for i in (0, 1) for t in world.pool.get_kv_buffer(i)], strict=True)
    )
    torch.testing.assert_close(
        graphs.run(*world.step(DECODE, [6, 8], [1, 1])), world.expected([6, 8], [1, 1]), msg="after an idle step"
    )


def test_outputs_and_inputs_may_have_a_row_a_request() -> None:
    world = GraphWorld()
    backend = TableBackend(world.env)
    world.prefill(backend, [4, 6])

    def last_rows(inputs, batch):
        return world.model(inputs, batch).index_select(0, inputs["rows"])

    graphs = GraphRunner(
        last_rows,
        backend,
        buckets=(1, 2, 4),
        device=CPU,
        max_query_width=3,
        options=GraphOptions(request_inputs=frozenset({"rows"}), output_rows=Rows.REQUESTS),
    )
    inputs, batch = world.step(VERIFY, [7, 9], [3, 3])
    out = graphs.run({**inputs, "rows": torch.tensor([2, 5])}, batch)
    torch.testing.assert_close(out, world.expected([7, 9], [3, 3])[[2, 5]])


def test_a_step_that_no_graph_serves_gives_every_reason() -> None:
    world = GraphWorld()
    graphs = runner(world, TableBackend(world.env), buckets=(1, 2))
    _, batch = world.step(ForwardMode.EXTEND, [3, 5, 2], [3, 2, 2])
    reasons = "\n".join(graphs.can_run(batch))
    for part in ("query widths [2, 3]", "captured up to 1", "largest bucket is 2"):
        assert part in reasons
    decode_only = TableBackend(world.env, SPEC.replace(graph_level=GraphLevel.DECODE))
    _, verify = world.step(VERIFY, [4], [2])
    assert "needs graph level UNIFORM" in "\n".join(runner(world, decode_only, width=2).can_run(verify))
    with pytest.raises(ContractViolation, match="ask can_run first"):
        graphs.run({}, batch)


def test_ragged_verify_needs_a_backend_that_supports_it() -> None:
    world = GraphWorld()
    backend = TableBackend(world.env)
    graphs = runner(world, backend, width=3)
    _, batch = world.step(VERIFY, [7, 9], [3, 3])
    short = batch.replace(extend_seq_lens_cpu=(3, 1))
    assert "requests with [1] of 3 drafts" in graphs.can_run(short)[0]
    backend.supports_ragged_verify_graph = True
    assert graphs.can_run(short) == []


def test_a_part_of_a_tree_verify_batch_stays_eager_and_one_of_a_chain_does_not() -> None:
    world = GraphWorld()
    graphs = runner(world, TableBackend(world.env), width=3)
    _, batch = world.step(VERIFY, [7, 9], [3, 3])
    assert graphs.can_run(batch) == []
    assert graphs.can_run(batch.slice(1, 2)) == []
    mask = VerifyMask.allocate(
        TreeMaskMode.QLEN_ONLY, max_bs=2, draft_token_num=3, max_context_len=16, device=torch.device("cpu")
    )
    tree = batch.replace(spec_info=replace(batch.spec_info, mask=mask))
    assert graphs.can_run(tree) == []
    assert "from row 1 of its mask" in graphs.can_run(tree.slice(1, 2))[0]


def test_inputs_that_differ_from_the_capture_s_are_refused_by_name() -> None:
    world = GraphWorld()
    backend = TableBackend(world.env)
    world.prefill(backend, [4])
    graphs = runner(world, backend)
    inputs, batch = world.step(DECODE, [5], [1])
    graphs.capture(inputs, batch)
    with pytest.raises(BatchError, match=r"input 'x' is \(1, 12\) torch.float32"):
        graphs.run({"x": inputs["x"].float()}, batch)
    with pytest.raises(BatchError, match=r"inputs \['x', 'y'\]; captured with \['x'\]"):
        graphs.run({**inputs, "y": torch.zeros(1)}, batch)
    with pytest.raises(BatchError, match="must have 1 rows"):
        GraphRunner(lambda i, b: i["x"].sum(0), TableBackend(world.env), buckets=(1,), device=CPU).run(inputs, batch)


def test_graph_state_is_initialised_once_for_all_runners() -> None:
    world = GraphWorld()
    backend = TableBackend(world.env)
    ensure_graph_state(backend, 4, 12)
    runner(world, backend, buckets=(1, 4), width=3)
    with pytest.raises(ContractViolation, match=r"buffers for 4 requests and 12 tokens; asked for 6 and 6"):
        runner(world, backend, buckets=(6,))
    with pytest.raises(ContractViolation, match="reserved a second time"):
        backend.init_cuda_graph_state(8, 8)


# Broken backends


def test_an_item_in_the_graph_is_named_with_its_line() -> None:
    world = GraphWorld()
    graphs = runner(world, ItemInGraph(world.env))
    with pytest.raises(ContractViolation, match=r"item\(\) in a captured region reads(.|\n)*table_backend\.py:\d+"):
        graphs.run(*world.step(DECODE, [5, 7], [1, 1]))


def test_a_tensor_rebuilt_at_replay_is_named_by_its_field() -> None:
    world = GraphWorld()
    graphs = runner(world, RebuiltAtReplay(world.env))
    with pytest.raises(ContractViolation) as caught:
        graphs.run(*world.step(DECODE, [5, 7], [1, 1]))
    lines = re.findall(r"table\.forward_metadata\[.*\]\.(\w+): captured at", str(caught.value))
    assert set(lines) == {"slots"}
    assert len(lines) == 2, "one line for each layer group"


@pytest.mark.parametrize("broken", [TableNotRefreshed, PaddingNotReset])
def test_a_backend_that_refreshes_too_little_gives_other_numbers(broken) -> None:
    """The comparison above can fail; axis D names these faults."""
    world = GraphWorld()
    backend = broken(world.env)
    lens = [4, 6, 1, 3]
    world.prefill(backend, lens)
    graphs = runner(world, backend, buckets=(4,))
    wrong = False
    for count in (4, 2, 4):
        lens = [n + (b < count) for b, n in enumerate(lens)]
        now, new = lens[:count], [1] * count
        out = graphs.run(*world.step(DECODE, now, new))
        wrong |= not torch.allclose(out, world.expected(now, new))
        if broken is PaddingNotReset and count == 2:
            # Stale rows write the last step's slots of requests that are not in this one.
            keys = world.pool.get_kv_buffer(0)[0][world.table[3, lens[2] - 1].long()]
            wrong |= bool((keys == world.pool.get_kv_buffer(0)[0][world.table[4, lens[3] - 1].long()]).all())
    assert wrong


# Read ends


@pytest.mark.parametrize(
    ("backend", "point"),
    [(TableBackend, SharedReadEnds.PRE_REPLAY), (InGraphTable, SharedReadEnds.IN_REPLAY)],
)
def test_the_scheduler_may_overwrite_at_the_declared_read_end(backend, point: SharedReadEnds) -> None:
    world, seen = GraphWorld(), []
    made = backend(world.env)
    world.prefill(made, [4, 6])
    kept = world.table.clone()
    overwrite = False

    def scheduler(reached: SharedReadEnds) -> None:
        seen.append(reached)
        if overwrite:
            world.table.fill_(0)

    fence = ReadEndFence(CPU, on_read_end=scheduler)
    graphs = runner(world, made, fence=fence)
    graphs.capture(*world.step(DECODE, [5, 7], [1, 1]))
    overwrite = True
    for lens in ([5, 7], [6, 8]):
        step = world.step(DECODE, lens, [1, 1])
        torch.testing.assert_close(graphs.run(*step), world.expected(lens, [1, 1]))
        assert not world.table.any(), "the scheduler did overwrite"
        world.table.copy_(kept)
    assert seen == [point, point]
    assert fence.effective is point


def test_an_undeclared_read_end_is_fenced_at_the_end_and_an_unmarked_graph_downgrades() -> None:
    seen: list[SharedReadEnds] = []
    fence = ReadEndFence(CPU, on_read_end=seen.append)
    fence.arm(SharedReadEnds.UNKNOWN)
    for point in (SharedReadEnds.PRE_REPLAY, SharedReadEnds.IN_REPLAY):
        fence.reached(point)
    assert seen == []
    fence.reached(SharedReadEnds.POST_REPLAY)
    assert seen == [SharedReadEnds.UNKNOWN]
    fence.arm(SharedReadEnds.IN_REPLAY, marked=False)
    assert fence.effective is SharedReadEnds.POST_REPLAY
    assert "IN_REPLAY became POST_REPLAY" in fence.downgrade


def test_results_do_not_depend_on_inference_mode() -> None:
    world = GraphWorld()
    backend = TableBackend(world.env)
    world.prefill(backend, [4, 6])
    with torch.inference_mode():
        graphs = runner(world, backend)
        out = graphs.run(*world.step(DECODE, [5, 7], [1, 1])).clone()
    torch.testing.assert_close(out.to(DTYPE), world.expected([5, 7], [1, 1]))
    torch.testing.assert_close(graphs.run(*world.step(DECODE, [6, 8], [1, 1])), world.expected([6, 8], [1, 1]))
