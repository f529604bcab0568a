from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernel library is not installed")

from attnplug.errors import ContractViolation
from attnplug.modes import ForwardMode
from attnplug.testing.case import Case, LayerCase
from attnplug.testing.step import make_step
from attnplug.testing.world import World
from attnplug_triton.options import TritonOptions
from attnplug_triton.planner import Planner

H200 = 132
CPU = torch.device("cpu")
LAYERS = (
    LayerCase(heads=8, kv_heads=2),
    LayerCase(heads=6, kv_heads=6, window=40),
    LayerCase(heads=16, kv_heads=1, dim=96),
)


def world(lengths, *, width=1, deterministic=False):
    mode = ForwardMode.DECODE if width == 1 else ForwardMode.TARGET_VERIFY
    case = Case(
        axis="A", check="planner", mode=mode, queries=(width,) * len(lengths), prefix=tuple(lengths), layers=LAYERS
    )
    return World(case, CPU, deterministic=deterministic)


def planned(lengths, *, in_graph=False, options=None, reserve=0):
    there = world(lengths)
    batch = make_step(there).batch.replace(uses_graph_buffers=in_graph)
    planner = Planner(there.env, options or TritonOptions(), H200)
    if reserve:
        planner.reserve(reserve, reserve)
    return planner, batch, list(planner.plan(batch, 1).values())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("ragged", ["always", "never"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_a_graphs_scratch_holds_every_batch_up_to_its_maxima(size, width, ragged, deterministic):
    there = world([3000] + [5] * (size - 1), width=width, deterministic=deterministic)
    batch = make_step(there).batch.replace(uses_graph_buffers=True)
    planner = Planner(there.env, TritonOptions(ragged=ragged), H200)
    planner.reserve(16, 16 * width)
    plans = planner.plan(batch, width)
    logits, lse = planner.scratch(batch, width, plans)
    assert len(plans) == len(LAYERS)
    for group, plan in plans.items():
        shape = planner.shapes[group]
        rows = plan.schedule.partials * width * shape.query_heads
        assert lse.numel() >= rows
        assert logits.numel() >= rows * shape.widths.dv


def test_scratch_of_a_graph_keeps_its_address_and_eager_scratch_is_another():
    planner, batch, _ = planned([3000, 9], in_graph=True, reserve=8)
    first = planner.scratch(batch, 1, planner.plan(batch, 1))[0]
    eager = batch.replace(uses_graph_buffers=False)
    other = planner.scratch(eager, 1, planner.plan(eager, 1))[0]
    again = planner.scratch(batch, 1, planner.plan(batch, 1))[0]
    assert first.data_ptr() == again.data_ptr() != other.data_ptr()


def test_a_graphs_batch_without_reserved_scratch_is_refused():
    planner, batch, plans = planned([3000, 9], in_graph=True)
    assert plans
    with pytest.raises(ContractViolation, match="init_cuda_graph_state"):
        planner.scratch(batch, 1, planner.plan(batch, 1))


def test_lengths_that_differ_stream_and_equal_ones_do_not():
    assert planned([3000, 9, 9, 9])[2][0].schedule.kind == "stream"
    assert planned([3000] * 4)[2][0].schedule.kind == "equal"


def test_a_graph_streams_because_it_outlives_its_lengths():
    assert planned([3000] * 4, in_graph=True)[2][0].schedule.kind == "stream"
    assert planned([3000] * 3, in_graph=True)[2][0].schedule.kind == "equal"


def test_a_short_window_is_one_programs_work():
    assert planned([3000, 9])[2][1].schedule.kind == "single"


def test_the_option_bounds_the_shares():
    assert planned([3000])[2][0].schedule.splits > 4
    assert planned([3000], options=TritonOptions(max_kv_splits=4))[2][0].schedule.splits == 4
