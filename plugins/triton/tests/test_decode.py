from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernel library is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st
from triton_device import DEVICE, HALF, LSE
from triton_problem import error, make, tree_of, worst
from triton_runs import run_decode

from attnplug_triton.kernels.args import Rules
from attnplug_triton.kernels.config import Schedule, TileConfig

TILE = TileConfig(16, 16, 4, 2)
SCHEDULES = {
    "single": Schedule("single", 1, 0),
    "equal": Schedule("equal", 3, 12),
    "stream": Schedule("stream", 5, 9),
}


def check(p, rules, schedule, tile=TILE, *, width=1, trees=None, limit=1e-5):
    out, lse = run_decode(p, rules, schedule, tile, width=width)
    true, true_lse = p.expected(rules, trees)
    assert error(out, true) < limit
    assert worst(lse, true_lse) < (1e-4 if limit < 1e-4 else LSE)
    return out


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("page", [1, 16, 64])
def test_every_schedule_reads_every_page_size(schedule, page):
    p = make([1] * 4, [0, 40, 129, 15], page=page, device=DEVICE)
    check(p, Rules(0.125), schedule)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_an_empty_request_gives_zeros_and_minus_infinity(schedule):
    p = make([1] * 3, [20, 7, 30], device=DEVICE)
    p.keys.lens[1] = 0
    p.lens[1], p.k_of[1], p.v_of[1] = 0, p.k_of[1][:0], p.v_of[1][:0]
    sinks = torch.zeros(4, device=DEVICE)
    out, lse = run_decode(p, Rules(0.125, sinks=sinks), schedule, TILE)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.isneginf(lse[1]).all()
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_batch_of_nothing_but_empty_requests_is_zero(schedule):
    p = make([1, 1], [5, 9], device=DEVICE)
    p.keys.lens.zero_()
    out, lse = run_decode(p, Rules(0.125), schedule, TILE)
    assert not out.any()
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize("length", [7, 8, 9, 10, 33])
@pytest.mark.parametrize("page", [1, 16])
def test_a_window_shows_one_key_more_than_its_size(length, page):
    p = make([1], [length - 1], page=page, device=DEVICE)
    check(p, Rules(0.125, window=8), SCHEDULES["single"])
    check(p, Rules(0.125, window=8), Schedule("equal", 2, 2))


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_cap_and_sinks_come_once_whatever_the_splits(schedule):
    p = make([1] * 4, [0, 40, 129, 15], device=DEVICE)
    check(p, Rules(0.5, cap=2.0, sinks=torch.randn(4, device=DEVICE)), schedule)


@pytest.mark.parametrize("heads", [(2, 2), (8, 1), (6, 2), (7, 1), (16, 1), (40, 1)], ids=str)
def test_groups_of_any_size_are_packed(heads):
    p = make([1, 1], [30, 3], heads=heads[0], kv_heads=heads[1], device=DEVICE)
    check(p, Rules(0.125), SCHEDULES["equal"])


@pytest.mark.parametrize("dims", [(16, 16), (80, 80), (96, 64), (64, 96), (192, 128), (256, 256)], ids=str)
def test_widths_that_are_no_power_of_two_and_that_differ(dims):
    p = make([1, 1], [40, 3], d=dims[0], dv=dims[1], page=16, device=DEVICE)
    check(p, Rules(0.1), SCHEDULES["equal"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_half_types(dtype, schedule):
    p = make([1] * 4, [0, 40, 129, 15], dtype=dtype, page=16, device=DEVICE)
    check(p, Rules(0.125), schedule, limit=HALF)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_keys_are_scaled_once(stored):
    p = make([1, 1], [40, 70], dtype=torch.bfloat16, kv_dtype=stored, page=64, device=DEVICE)
    check(p, Rules(0.125, k_scale=0.5, v_scale=3.0), SCHEDULES["equal"], limit=HALF)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("window", [-1, 3, 20])
def test_a_chain_of_drafts_is_causal_bottom_right(schedule, window):
    p = make([5] * 3, [0, 40, 100], page=16, device=DEVICE)
    check(p, Rules(0.125, window=window), schedule, width=5)


@pytest.mark.parametrize("full", [True, False], ids=["full", "qlen"])
@pytest.mark.parametrize("window", [-1, 6])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_tree_of_drafts_sees_its_ancestors(full, window, schedule):
    p = make([7] * 3, [0, 40, 100], device=DEVICE)
    tree, masks, p.positions = tree_of(p, full)
    check(p, Rules(0.125, window=window, tree=tree), schedule, width=7, trees=masks)


def test_verify_lengths_leave_the_window_out():
    p = make([5] * 3, [0, 40, 100], device=DEVICE)
    p.keys = p.keys._replace(lens=p.keys.lens - 5, extra_len=5)
    check(p, Rules(0.125), SCHEDULES["stream"], width=5)


@pytest.mark.parametrize("heads", [16, 40])
@pytest.mark.parametrize("page", [1, 64])
def test_absorbed_mla_reads_values_out_of_its_keys(heads, page):
    p = make([1, 1], [40, 3], heads=heads, kv_heads=1, d=64, rope=16, page=page, device=DEVICE)
    check(p, Rules(0.1), SCHEDULES["equal"], TileConfig(16, 16, 4, 2))


def test_pages_as_entries_of_the_table():
    p = make([1, 1], [40, 70], page=16, device=DEVICE)
    ids = p.keys.table.ids
    pages = torch.div(ids[:, ::16], 16, rounding_mode="floor")
    p.keys = p.keys._replace(table=p.keys.table._replace(ids=pages.contiguous(), entry=16))
    check(p, Rules(0.125), SCHEDULES["equal"])
    check(p, Rules(0.125), SCHEDULES["equal"], TileConfig(16, 32, 4, 2))


def test_fixed_shares_make_a_request_independent_of_its_batch(monkeypatch):
    from attnplug_triton.kernels import decode_launch

    monkeypatch.setattr(decode_launch, "FIXED_SPLIT_TOKENS", 32)
    p = make([1] * 3, [50, 128, 9], dtype=torch.float32, device=DEVICE)
    together = check(p, Rules(0.125), Schedule("fixed", 5, 15))
    p.q, p.keys = (
        p.q[1:2],
        p.keys._replace(lens=p.keys.lens[1:2], table=p.keys.table._replace(rows=p.keys.table.rows[1:2])),
    )
    alone, _ = run_decode(p, Rules(0.125), Schedule("fixed", 7, 7), TILE)
    assert torch.equal(alone[0], together[1])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lens=st.lists(st.integers(0, 90), min_size=1, max_size=6),
    groups=st.integers(1, 12),
    window=st.sampled_from([-1, 0, 17, 40]),
)
def test_stream_shares_cover_every_key_exactly_once(lens, groups, window):
    p = make([1] * len(lens), lens, heads=2, kv_heads=1, d=16, device=DEVICE)
    check(p, Rules(0.25, window=window), Schedule("stream", groups, groups + len(lens)))
