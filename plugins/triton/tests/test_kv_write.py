from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernel library is not installed")

from triton_device import DEVICE

from attnplug.kv.quant import quantize
from attnplug_triton.kernels.kv_write import write_kv

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 4.0)], ids=str)
def test_rows_are_stored_as_the_core_stores_them(stored, scales):
    dtype = stored if stored.itemsize > 1 else torch.bfloat16
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(7, 2, width, generator=g) * 300 for width in (24, 40))
    if DEVICE == "cpu":
        # The interpreter's conversions truncate or lose a carry, so there only exact values can be compared.
        k, v = (quantize(x, 1.0, stored).float() * scale for x, scale in zip((k, v), scales, strict=True))
    # fp8 saturates.
    k[0], v[1] = 1e5 if dtype == torch.bfloat16 else 6e4, -6e4
    k, v = k.to(dtype).to(DEVICE), v.to(dtype).to(DEVICE)
    slots = torch.tensor([3, 9, 1, 30, 2, 8, 17], device=DEVICE)
    pools = [torch.zeros(32, 2, width, dtype=stored, device=DEVICE) for width in (24, 40)]
    write_kv(k, v, *pools, slots, k_scale=scales[0], v_scale=scales[1])
    for rows, pool, scale in ((k, pools[0], scales[0]), (v, pools[1], scales[1])):
        expected = torch.zeros_like(pool).float()
        expected[slots] = quantize(rows, scale, stored).float()
        assert torch.equal(pool.float(), expected)


def test_rows_of_a_fused_projection_are_read_in_place():
    qkv = torch.randn(5, 10, 16, device=DEVICE)
    k, v = qkv[:, 6:8], qkv[:, 8:10]
    pools = [torch.zeros(9, 2, 16, device=DEVICE) for _ in range(2)]
    slots = torch.tensor([8, 1, 4, 2, 7], device=DEVICE)
    write_kv(k, v, *pools, slots)
    assert torch.equal(pools[0][slots], k)
    assert torch.equal(pools[1][slots], v)
    assert not pools[0][[0, 3, 5, 6]].any()


def test_no_rows_launch_nothing():
    empty = torch.zeros(0, 2, 16, device=DEVICE)
    pool = torch.ones(4, 2, 16, device=DEVICE)
    write_kv(empty, empty, pool, pool, torch.zeros(0, dtype=torch.int64, device=DEVICE))
    assert torch.equal(pool, torch.ones_like(pool))
