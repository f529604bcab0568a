"""Budgets come from the case, are finite, and are a small share of what they are a budget of."""

from __future__ import annotations

import pytest
import torch

from attnplug.testing.bench import Bench
from attnplug.testing.case import Case
from attnplug.testing.expected import expect

from .subjects import dense_subject

CASE = "A:causal:extend:q=5,1,23:p=0,13,40:{dtype}:4/2x64{extra}:page=16"


@pytest.mark.parametrize("extra", ["", ",w4", ",c3.0", ",s", ",w0"])
@pytest.mark.parametrize(("dtype", "share"), [("float32", 1e-5), ("bfloat16", 0.1), ("float16", 0.008)])
def test_a_budget_is_finite_and_a_small_share_of_each_row(dtype: str, share: float, extra: str) -> None:
    # float16 is not the dense backend's; the budget needs no backend.
    bench = Bench(dense_subject(), Case.parse(CASE.format(dtype="float32", extra=extra)))
    bench.world.dtype = getattr(torch, dtype)
    want = expect(bench.world, bench.step(), 0, lse=True)
    size = want.out.abs().amax(dim=-1)
    assert bool(torch.isfinite(want.allowed.out).all())
    assert bool((want.allowed.out > 0).all())
    assert float((want.allowed.out / size).max()) < share
    assert bool(torch.isfinite(want.allowed.lse).all())
    assert float(want.allowed.lse.max()) < share


def test_a_narrower_dtype_has_a_wider_budget() -> None:
    bench = Bench(dense_subject(), Case.parse(CASE.format(dtype="float32", extra="")))
    sizes = []
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        bench.world.dtype = dtype
        sizes.append(float(expect(bench.world, bench.step(), 0).allowed.out.median()))
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[1] / 1e4


def test_a_row_that_sees_nothing_has_a_budget_of_zero() -> None:
    case = Case.parse("C:no_encoder:decode:q=1,1:p=3,5:float32:4/2x64,cross:page=16:enc=0,4")
    bench = Bench(dense_subject(), case)
    want = expect(bench.world, bench.step(), 0)
    assert float(want.allowed.out[0].max()) == 0.0
    assert float(want.out[0].abs().max()) == 0.0
