"""Prefill in captured pieces around eager attention equals eager prefill, in both ways of the contract."""

from __future__ import annotations

import random
from dataclasses import replace as copy_of
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug.batch import ForwardBatch
from attnplug.errors import ContractViolation
from attnplug.graphs.breakable import BreakableGraphRunner
from attnplug.graphs.inputs import Rows
from attnplug.graphs.options import EVERY_REPLAY, GraphOptions
from attnplug.graphs.overlap import ReadEndFence
from attnplug.modes import ForwardMode, GraphLevel, SharedReadEnds
from attnplug.wrappers.hybrid import HybridAttnBackend
from attnplug.wrappers.two_batch import TwoBatchOverlapBackend

from .graph_world import MAX_BS, MAX_CONTEXT, GraphWorld
from .table_backend import SPEC, InGraphTable, TableBackend, TableMetadata

CPU = torch.device("cpu")
EXTEND = ForwardMode.EXTEND
NO_GRAPHS = SPEC.replace(graph_level=GraphLevel.NONE)


class CapturedMetadata(TableBackend):
    """Opts in: a piece of the model reads its metadata (here: how long each request is), so addresses are fixed."""

    use_captured_forward_metadata_for_breakable_cuda_graph = True
    prefill_cuda_graph_max_batch_size = 4
    statics: list[ForwardBatch | None]

    def init_forward_metadata_for_breakable_cuda_graph_capture(self, batch: ForwardBatch) -> Any:
        assert batch.uses_graph_buffers
        self.statics = []
        made = {}
        for group in self.env.model_spec.groups:
            made[group] = TableMetadata(
                torch.zeros(4, self.width, dtype=torch.int32),
                torch.zeros(4, dtype=torch.int64),
                torch.zeros(64, dtype=torch.int64),
            )
            self.refresh(made[group], batch)
        return made

    def refresh(self, fixed: TableMetadata, batch: ForwardBatch) -> None:
        b, t = batch.batch_size, batch.num_tokens
        fixed.lens.zero_()
        self.fill(TableMetadata(fixed.slots[:b], fixed.lens[:b], fixed.row_of[:t]), batch)

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(
        self, captured: Any, batch: ForwardBatch, *, static_forward_batch: ForwardBatch | None = None
    ) -> None:
        self.statics.append(static_forward_batch)
        for fixed in captured.values():
            self.refresh(fixed, batch)
        self.forward_metadata = captured

    def forward_decode(self, q: Tensor, *args: Any, **kwargs: Any) -> Any:
        whole = self.forward_metadata
        self.forward_metadata = {g: copy_of(m, row_of=m.row_of[: q.shape[0]]) for g, m in whole.items()}
        try:
            return super().forward_decode(q, *args, **kwargs)
        finally:
            self.forward_metadata = whole

    forward_extend = forward_decode


class MovedMetadata(CapturedMetadata):
    def prepare_forward_metadata_for_breakable_cuda_graph_replay(
        self, captured: Any, batch: ForwardBatch, *, static_forward_batch: ForwardBatch | None = None
    ) -> None:
        super().prepare_forward_metadata_for_breakable_cuda_graph_replay(captured, batch)
        self.forward_metadata = {g: copy_of(m, lens=m.lens.clone()) for g, m in captured.items()}


def runner(world: GraphWorld, backend, buckets=(4, 8, 16), fence=None, model=None, **extra) -> BreakableGraphRunner:
    options = GraphOptions(pointer_checks=EVERY_REPLAY, **extra.pop("options", {}))
    return BreakableGraphRunner(
        model or world.model,
        backend,
        buckets=buckets,
        max_requests=MAX_BS,
        device=CPU,
        options=options,
        fence=fence,
        **extra,
    )


def backend_of(world: GraphWorld, how: str):
    if how == "captured_metadata":
        return CapturedMetadata(world.env)
    if how == "hybrid":
        return HybridAttnBackend(InGraphTable(world.env), TableBackend(world.env))
    if how == "two_batch":
        return TwoBatchOverlapBackend(TableBackend(world.env), InGraphTable(world.env))
    return TableBackend(world.env, NO_GRAPHS if how == "no_graphs" else SPEC)


@pytest.mark.parametrize("how", ["plain", "no_graphs", "hybrid", "two_batch", "captured_metadata"])
def test_chunked_prefill_in_pieces_equals_a_dense_pass(how: str) -> None:
    world, rng = GraphWorld(), random.Random(5)
    graphs = runner(world, backend_of(world, how))
    lens = [0] * MAX_BS
    for _ in range(10):
        requests = [r for r in rng.sample(range(MAX_BS), rng.choice([1, 2, 4])) if lens[r] < 18]
        if not requests:
            break
        new = [rng.randint(1, 4) for _ in requests]
        for r, n in zip(requests, new, strict=True):
            lens[r] += n
        now = [lens[r] for r in requests]
        out = graphs.run(*world.step(EXTEND, now, new, requests))
        torch.testing.assert_close(out, world.expected(now, new, requests))


def test_the_model_s_python_and_one_piece_more_than_attention_calls() -> None:
    world, ran = GraphWorld(), []

    def model(inputs, batch):
        ran.append(batch.num_tokens)
        return world.model(inputs, batch)

    backend = TableBackend(world.env)
    graphs = runner(world, backend, buckets=(4,), model=model)
    graphs.run(*world.step(EXTEND, [3], [3]))
    seen, calls = list(ran), backend.calls
    graphs.run(*world.step(EXTEND, [7], [4]))
    assert ran == seen, "the model's Python ran at a replay"
    assert backend.calls == calls + 2, "attention is eager: one call a layer"


def test_captured_metadata_is_refreshed_with_the_static_batch_of_fixed_addresses() -> None:
    world = GraphWorld()
    backend = CapturedMetadata(world.env)

    def model(inputs, batch):
        # Between two breaks the model reads the backend's metadata and the batch: both were captured.
        total = next(iter(backend.forward_metadata.values())).lens.sum()
        return world.model(inputs, batch) + total + batch.positions[:, None]

    graphs = runner(world, backend, buckets=(8,), model=model)
    for lens, new in (([3, 2], [3, 2]), ([7], [4]), ([5, 6, 2], [2, 4, 2])):
        requests = [3, 4, 5][: len(lens)] if len(lens) == 3 else list(range(len(lens)))
        if len(lens) == 3:
            world.eager(TableBackend(world.env), *world.step(EXTEND, [3, 2], [3, 2], [3, 4]))
        inputs, batch = world.step(EXTEND, lens, new, requests)
        out = graphs.run(inputs, batch)
        expected = world.expected(lens, new, requests) + sum(lens) + batch.positions[:, None]
        torch.testing.assert_close(out, expected)
    addresses = {static.positions.data_ptr() for static in backend.statics if static is not None}
    assert len(backend.statics) == 3
    assert len(addresses) == 1
    assert None not in backend.statics


def test_captured_metadata_that_moves_is_named_by_its_field() -> None:
    world = GraphWorld()
    backend = MovedMetadata(world.env)

    def model(inputs, batch):
        return world.model(inputs, batch) + next(iter(backend.forward_metadata.values())).lens.sum()

    with pytest.raises(ContractViolation, match=r"replay of a prefill of 4 tokens(.|\n)*\.lens: captured at"):
        runner(world, backend, model=model, buckets=(4,)).run(*world.step(EXTEND, [3], [3]))


def test_bounds_are_honoured_with_reasons() -> None:
    world = GraphWorld()
    graphs = runner(world, CapturedMetadata(world.env))
    _, five = world.step(EXTEND, [2] * 5, [1] * 5)
    assert graphs.can_run(five) == ["5 requests; a captured prefill has at most 4"]
    _, long = world.step(EXTEND, [17], [17])
    assert graphs.can_run(long) == ["17 tokens; the largest bucket is 16"]
    _, decode = world.step(ForwardMode.DECODE, [4], [1])
    assert "decode is not captured in pieces" in graphs.can_run(decode)[0]
    with pytest.raises(ContractViolation, match="at most 4"):
        graphs.run({}, five)


def test_mixed_prefill_stays_eager_where_the_backend_prefers_it_under_dp_attention() -> None:
    world = GraphWorld()
    backend = TableBackend(world.env)
    _, batch = world.step(ForwardMode.MIXED, [5, 4], [3, 1])
    assert runner(world, backend, dp_attention=True).can_run(batch) == []
    backend.prefer_eager_mixed_prefill_under_dp_attention = True
    assert runner(world, backend).can_run(batch) == []
    assert "prefers mixed prefills eager" in runner(world, backend, dp_attention=True).can_run(batch)[0]


def test_a_bucket_beyond_what_dummy_requests_can_hold_is_refused() -> None:
    world = GraphWorld()
    backend = TableBackend(world.env)
    inputs, batch = world.step(EXTEND, [3], [3])
    runner(world, backend, buckets=(2 * MAX_CONTEXT,)).capture(inputs, batch)
    backend.extend_dummy_seqs_capped_by_req_pool = True
    small = world.env.replace(req_to_token=world.table[:1])
    backend.env = small
    with pytest.raises(ContractViolation, match=r"needs 2 requests of 24 positions; table is bound .* 1 rows"):
        runner(world, backend, buckets=(2 * MAX_CONTEXT,)).capture(inputs, batch)


def test_a_synchronising_operation_between_attention_calls_is_named_with_its_line() -> None:
    world = GraphWorld()

    def model(inputs, batch):
        return world.model(inputs, batch) * inputs["x"].sum().item()

    graphs = runner(world, TableBackend(world.env), model=model)
    with pytest.raises(ContractViolation, match=r"item\(\) in a captured region(.|\n)*test_breakable_runner\.py"):
        graphs.run(*world.step(EXTEND, [3], [3]))


def test_a_model_that_skips_a_layer_at_capture_is_refused() -> None:
    world, runs = GraphWorld(), []

    def model(inputs, batch):
        runs.append(1)
        out = world.model(inputs, batch)
        return world.model({"x": out}, batch) if len(runs) < 3 else out

    with pytest.raises(ContractViolation, match="2 attention calls; at warm-up 4"):
        runner(world, TableBackend(world.env), model=model).run(*world.step(EXTEND, [3], [3]))


def test_outputs_may_have_a_row_a_request() -> None:
    world = GraphWorld()

    def model(inputs, batch):
        return world.model(inputs, batch).index_select(0, inputs["last"])

    options = {"request_inputs": frozenset({"last"}), "output_rows": Rows.REQUESTS}
    graphs = runner(world, TableBackend(world.env), model=model, options=options)
    inputs, batch = world.step(EXTEND, [3, 2], [3, 2])
    out = graphs.run({**inputs, "last": torch.tensor([2, 4])}, batch)
    torch.testing.assert_close(out, world.expected([3, 2], [3, 2])[[2, 4]])


@pytest.mark.parametrize("end", list(SharedReadEnds))
def test_the_event_is_recorded_where_the_backend_s_reads_end(end: SharedReadEnds) -> None:
    world, order = GraphWorld(), []
    backend = TableBackend(world.env)
    backend.shared_read_ends = lambda mode: end
    original = backend.forward_extend

    def logged(*args, **kwargs):
        order.append("attention")
        return original(*args, **kwargs)

    backend.forward_extend = logged
    in_graph = backend.init_forward_metadata_in_graph
    backend.init_forward_metadata_in_graph = lambda batch: (order.append("in_graph"), in_graph(batch))
    graphs = runner(world, backend, fence=ReadEndFence(CPU, on_read_end=lambda point: order.append(point.name)))
    step = world.step(EXTEND, [3], [3])
    graphs.capture(*step)
    order.clear()
    graphs.run(*step)
    expected = ["in_graph", "attention", "attention"]
    at = {SharedReadEnds.PRE_REPLAY: 0, SharedReadEnds.IN_REPLAY: 1}.get(end, 3)
    expected.insert(at, end.name)
    assert order == expected
