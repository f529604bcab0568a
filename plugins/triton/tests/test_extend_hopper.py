from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernel library is not installed")

import triton
from triton_problem import error, make, worst

from attnplug_triton.kernels.args import Rules

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
PROVEN = triton.__version__.startswith("3.6.")

pytestmark = pytest.mark.skipif(
    not (HOPPER and PROVEN), reason="Gluon has no interpreter: needs a Hopper GPU, Triton 3.6"
)

SHAPES = {
    "one": ([128], [0]),
    "ragged": ([200, 1, 77, 130, 64], [0, 500, 63, 64, 1]),
    "long": ([300], [1700]),
    "odd half page": ([40, 257], [25, 70]),
}


def run(p, rules, *, uniform=0):
    from attnplug_triton.kernels.extend_hopper_launch import extend_hopper, takes

    assert takes(p.q, p.keys, rules, p.widths)
    out = torch.full_like(p.q, float("nan"))
    lse = torch.full(p.q.shape[:2], float("nan"), device="cuda")
    lens = None if uniform else torch.tensor(p.query_lens, dtype=torch.int32, device="cuda")
    extend_hopper(
        p.q,
        lens,
        rules,
        p.keys,
        batch_size=len(p.lens),
        max_query_len=max(p.query_lens),
        uniform=uniform,
        out=out,
        lse=lse,
    )
    return out, lse


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(8, 2), (12, 2), (2, 1), (32, 4)], ids=str)
def test_the_hopper_kernel_computes_what_its_twin_does(shape, page, causal, heads):
    p = make(*shape, heads=heads[0], kv_heads=heads[1], d=128, page=page, dtype=torch.bfloat16, device="cuda")
    rules = Rules(0.0884, causal=causal, k_scale=1.5, v_scale=0.5)
    out, lse = run(p, rules)
    true, true_lse = p.expected(rules)
    assert error(out, true) < 4e-3
    assert worst(lse, true_lse) < 2e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sinks_and_uniform_widths(dtype):
    p = make([96] * 3, [0, 100, 333], heads=8, kv_heads=2, d=128, page=64, dtype=dtype, device="cuda")
    rules = Rules(0.0884, sinks=torch.randn(8, device="cuda") + 2)
    out, lse = run(p, rules, uniform=96)
    true, true_lse = p.expected(rules)
    assert error(out, true) < 4e-3
    assert worst(lse, true_lse) < 2e-3


def test_what_it_does_not_compute_it_does_not_take():
    from attnplug_triton.kernels.extend_hopper_launch import takes

    p = make([128], [0], heads=8, kv_heads=2, d=128, page=64, dtype=torch.bfloat16, device="cuda")
    assert not takes(p.q, p.keys, Rules(0.1, window=9), p.widths)
    assert not takes(p.q, p.keys, Rules(0.1, cap=9.0), p.widths)
    assert not takes(p.q.float(), p.keys, Rules(0.1), p.widths)
    for other in ({"page": 16}, {"heads": 2, "kv_heads": 2}, {"d": 64}):
        o = make(
            [128],
            [0],
            **{"heads": 8, "kv_heads": 2, "d": 128, "page": 64, **other},
            dtype=torch.bfloat16,
            device="cuda",
        )
        assert not takes(o.q, o.keys, Rules(0.1), o.widths)
