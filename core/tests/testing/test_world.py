"""A world's poison is where it must be, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from attnplug.modes import KVSpace
from attnplug.testing.case import Case
from attnplug.testing.monitor import PoolWatch, Untouched, take
from attnplug.testing.poison import CANARY, OUT_OF_RANGE, nan_empty
from attnplug.testing.results import Failure
from attnplug.testing.step import make_step
from attnplug.testing.world import World

CPU = torch.device("cpu")


def world(extra: str = "", layer: str = "4/2x64", dtype: str = "float32") -> World:
    return World(Case.parse(f"A:causal:extend:q=5,3:p=9,18:{dtype}:{layer}:page=4{extra}"), CPU)


@pytest.mark.parametrize("extra", ["", ":layout=HND", ":kv=float8_e4m3fn", ":place=run", ":place=shared"])
def test_cached_positions_hold_the_logical_values_and_all_else_is_poison(extra: str) -> None:
    one = world(extra)
    keys, _ = one.stored(0)
    place = one.placements[KVSpace.FULL]
    every = torch.arange(one.pool.num_slots)
    rows = take(one, keys, every).float()
    listed = torch.isin(every // 4, place.pages)
    assert bool(torch.isnan(rows[~listed & (every >= 4)]).all())
    assert bool((rows[0] == CANARY).all())
    assert bool(torch.isfinite(rows[listed]).all())
    for b, slots in enumerate(place.slots):
        cached = one.case.prefix[b]
        assert torch.equal(rows[slots[:cached]], one.data[0].k_units[b][:cached].float())
        # What this step will write is not there yet.
        assert float(rows[slots[cached:]].abs().min()) > 100


def test_tables_hold_out_of_range_ids_beyond_a_length_and_the_sink_in_the_padding_row() -> None:
    one = world()
    place = one.placements[KVSpace.FULL]
    for row, slots in zip(place.rows.tolist(), place.slots, strict=True):
        assert one.table[row, : slots.numel()].tolist() == slots.tolist()
        assert set(one.table[row, slots.numel() :].tolist()) == {OUT_OF_RANGE}
    assert set(one.table[0].tolist()) == {0}


def test_positions_that_a_window_cuts_are_huge_in_pool_and_truth() -> None:
    one = world(layer="4/2x64,w4")
    data = one.data[0]
    assert float(data.k_true[1][: 18 - 4].abs().min()) > 1000
    assert float(data.k_true[1][18 - 4 :].abs().max()) < 10
    assert float(data.v_units[1][: 18 - 4].abs().min()) > 1000


def test_requests_are_scattered_and_shared_prefixes_are_one() -> None:
    slots = world().placements[KVSpace.FULL].slots
    assert not bool((slots[1][1:] - slots[1][:-1] == 1).all())
    shared = world(":place=shared").placements[KVSpace.FULL].slots
    assert shared[0][:8].tolist() == shared[1][:8].tolist()
    assert not set(shared[0][8:].tolist()) & set(shared[1][8:].tolist())


def test_data_is_the_same_for_every_dtype_of_pool_and_exact_in_it() -> None:
    fp8 = world(":kv=float8_e4m3fn", layer="4/2x64,ks0.37,vs1.7")
    data = fp8.data[0]
    assert torch.equal(data.k_units[1].double() * 0.37, data.k_true[1])
    assert float((data.k[1].double() - data.k_true[1]).abs().max()) < 1e-6


def test_memory_without_a_value_is_nan_in_every_form() -> None:
    base = torch.zeros(3)
    with nan_empty():
        made = [torch.empty(3), torch.empty_like(base), base.new_empty(3), torch.empty_strided((3,), (1,))]
        halves = torch.empty(3, dtype=torch.bfloat16), torch.empty(3, dtype=torch.float8_e5m2)
        counts = torch.empty(3, dtype=torch.int64)
    assert all(bool(torch.isnan(one).all()) for one in made)
    assert all(bool(torch.isnan(one.float()).all()) for one in halves)
    assert counts.dtype == torch.int64


def test_a_write_to_what_may_only_be_read_is_named() -> None:
    step = make_step(world())
    kept = Untouched(batch=step.batch)
    step.batch.positions[0] += 1
    with pytest.raises(Failure, match=r"batch\.positions"):
        kept.verify()


@pytest.mark.parametrize("extra", ["", ":layout=HND", ":kv=float8_e5m2"])
def test_the_pool_watch_takes_exactly_the_steps_rows(extra: str) -> None:
    one = world(extra)
    step, watch = make_step(one), PoolWatch(one)
    for buffer, units in zip(one.stored(0), one.units(0), strict=True):
        rows = torch.cat([units[s.request][s.start : s.stop] for s in step.spans])
        one.put(buffer, step.batch.out_cache_loc, rows)
    watch.verify(step, 0, saved=True)
    again = PoolWatch(one)
    one.put(one.stored(0)[0], torch.tensor([1]), torch.ones(1, 2, 64).to(one.kv_dtype))
    with pytest.raises(Failure, match=r"keys changed at slots \[1\]"):
        again.verify(step, None, saved=False)
