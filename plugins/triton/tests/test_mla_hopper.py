from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernel library is not installed")

import triton
from triton_problem import error, make, worst

from attnplug_triton.kernels.args import Rules
from attnplug_triton.kernels.config import Schedule
from attnplug_triton.kernels.decode_launch import Partials

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = pytest.mark.skipif(
    not (HOPPER and triton.__version__.startswith("3.6.")),
    reason="Gluon has no interpreter: this needs a Hopper GPU and Triton 3.6",
)


def run(p, splits, rules):
    from attnplug_triton.kernels.mla_hopper_launch import mla_hopper, takes

    batch, heads = p.q.shape[:2]
    schedule = Schedule("single", 1, 0) if splits == 1 else Schedule("equal", splits, splits * batch)
    assert takes(p.q, p.keys, rules, p.widths, 1, schedule)
    out = torch.full_like(p.q, float("nan"))
    lse = torch.full(p.q.shape[:2], float("nan"), device="cuda")
    rows = max(schedule.partials, 1) * heads
    partials = Partials(*(torch.full((n,), float("nan"), device="cuda") for n in (rows * 512, rows)))
    mla_hopper(p.q, p.q_rope, p.keys, rules, schedule=schedule, partials=partials, out=out, lse=lse)
    return out, lse


def problem(lens, heads, dtype):
    cached, shape = [n - 1 for n in lens], {"kv_heads": 1, "d": 512, "rope": 64, "page": 64}
    return make([1] * len(lens), cached, heads=heads, **shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("lens", [[1], [64], [65], [700, 3, 129, 2000]], ids=str)
@pytest.mark.parametrize("splits", [1, 3, 16])
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_hopper_kernel_computes_what_its_twin_does(lens, splits, heads, dtype):
    p, rules = problem(lens, heads, dtype), Rules(0.05, k_scale=1.5)
    out, lse = run(p, splits, rules)
    true, true_lse = p.expected(rules)
    assert error(out, true) < 4e-3
    assert worst(lse, true_lse) < 2e-3


@pytest.mark.parametrize("splits", [1, 4])
def test_an_empty_request_gives_zeros(splits):
    p = problem([71, 6], 64, torch.bfloat16)
    p.keys.lens[1] = 0
    out, lse = run(p, splits, Rules(0.05))
    assert not out[1].any()
    assert torch.isneginf(lse[1]).all()
    assert torch.isfinite(out).all()
