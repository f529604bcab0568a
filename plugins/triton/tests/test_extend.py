from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernel library is not installed")

from triton_device import DEVICE, HALF, LSE
from triton_problem import error, make, tree_of, worst
from triton_runs import run_extend

from attnplug_triton.kernels.args import Rules
from attnplug_triton.kernels.config import TileConfig
from attnplug_triton.kernels.extend_launch import NewRows

TILE = TileConfig(32, 16, 4, 2)
RAGGED = ([5, 1, 17, 33], [0, 40, 100, 7])


def check(p, rules, tile=TILE, *, trees=None, limit=1e-5, **how):
    out, lse = run_extend(p, rules, tile, **how)
    true, true_lse = p.expected(rules, trees)
    assert error(out, true) < limit
    assert worst(lse, true_lse) < (1e-4 if limit < 1e-4 else LSE)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("surplus", [0, 3])
def test_ragged_extend_over_prefixes(page, surplus):
    check(make(*RAGGED, page=page, device=DEVICE), Rules(0.125), surplus=surplus)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 8, 40])
def test_windows_reach_back_and_without_causality_forward(causal, window):
    check(make(*RAGGED, page=16, device=DEVICE), Rules(0.125, causal=causal, window=window))


def test_without_causality_every_key_is_seen():
    check(make(*RAGGED, device=DEVICE), Rules(0.125, causal=False))


def test_cap_and_sinks():
    check(make(*RAGGED, device=DEVICE), Rules(0.5, cap=2.0, sinks=torch.randn(4, device=DEVICE)))


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (7, 1), (16, 1)], ids=str)
def test_groups_of_any_size(heads):
    check(make(*RAGGED, heads=heads[0], kv_heads=heads[1], device=DEVICE), Rules(0.125))


@pytest.mark.parametrize("dims", [(80, 80), (96, 64), (192, 128)], ids=str)
def test_widths(dims):
    check(make([9, 3], [20, 0], d=dims[0], dv=dims[1], device=DEVICE), Rules(0.1))


def test_half_type_and_fp8():
    check(make(*RAGGED, dtype=torch.bfloat16, device=DEVICE), Rules(0.125), limit=HALF)
    p = make(*RAGGED, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, page=16, device=DEVICE)
    check(p, Rules(0.125, k_scale=0.5, v_scale=3.0), limit=HALF)


@pytest.mark.parametrize("window", [-1, 12])
def test_new_rows_that_are_not_in_the_pool_are_read_from_the_call(window):
    p = make(*RAGGED, page=16, device=DEVICE)
    k = torch.cat([k[n - q :] for k, n, q in zip(p.k_of, p.lens, p.query_lens, strict=True)])
    v = torch.cat([v[n - q :] for v, n, q in zip(p.v_of, p.lens, p.query_lens, strict=True)])
    for b, (n, q) in enumerate(zip(p.lens, p.query_lens, strict=True)):
        slots = p.keys.table.ids[p.keys.table.rows[b], n - q : n].long()
        p.keys.k[slots], p.keys.v[slots] = 1e30, 1e30
    check(p, Rules(0.125, window=window), new=NewRows(k, v))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [-1, 4])
def test_an_encoder_reads_the_rows_of_its_own_request(causal, window):
    p = make([5, 1, 33], [0, 0, 0], device=DEVICE)
    rows = NewRows(torch.cat(p.k_of), torch.cat(p.v_of))
    check(p, Rules(0.125, causal=causal, window=window), new=rows, pool=False)


def test_a_chunk_of_the_prefix_by_its_own_indptr():
    p = make([5, 1, 17], [0, 0, 0], device=DEVICE)
    other = make([9, 0, 20], [0, 0, 0], seed=1, device=DEVICE)
    indptr = torch.tensor([0, 9, 9, 29], device=DEVICE)
    p.k_of, p.v_of = other.k_of, other.v_of
    rows = NewRows(torch.cat(p.k_of), torch.cat(p.v_of), indptr)
    p.lens = [9, 0, 20]
    out, lse = run_extend(p, Rules(0.125, causal=False), TILE, new=rows, pool=False)
    true, true_lse = p.expected(Rules(0.125, causal=False))
    assert error(out, true) < 1e-5
    assert worst(lse, true_lse) < 1e-4


@pytest.mark.parametrize("full", [True, False], ids=["full", "qlen"])
@pytest.mark.parametrize("window", [-1, 6])
def test_a_tree_of_drafts(full, window):
    p = make([7] * 3, [0, 40, 100], device=DEVICE)
    tree, masks, p.positions = tree_of(p, full)
    check(p, Rules(0.125, window=window, tree=tree), trees=masks, uniform=True)


def test_absorbed_mla():
    check(make([5, 9], [40, 0], heads=16, kv_heads=1, d=64, rope=16, page=16, device=DEVICE), Rules(0.1))
