"""Dtypes of the model and of the pool, scales, and bitwise independence of what else is in a batch."""

from __future__ import annotations

import pytest
import torch
from dense_world import World, assert_exact, layer

from attnplug.modes import ForwardMode

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LENS, NEW = (1, 33, 257, 300), (1, 20, 1, 100)


@pytest.mark.parametrize("kv", FP8)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_fp8_pool_is_read_with_its_scales(kv: str, layout: str, mode: ForwardMode) -> None:
    new = NEW if mode is ForwardMode.EXTEND else (1,) * 4
    spec = layer(has_kv_scales=True)
    world = World(spec, LENS, new, mode, kv_dtype=FP8[kv], layout=layout, page_size=16, k_scale=0.3, v_scale=1.7)
    assert_exact(world.run().out, world.expect()[0])


@pytest.mark.parametrize("kv", FP8)
def test_fp8_rows_that_are_not_saved_round_as_the_pool_would(kv: str) -> None:
    world = World(layer(has_kv_scales=True), LENS, NEW, kv_dtype=FP8[kv], k_scale=0.3, v_scale=1.7)
    assert_exact(world.run(save=False).out, world.expect()[0])


def test_scales_hold_for_a_pool_of_full_width_too() -> None:
    world = World(layer(has_kv_scales=True), LENS, NEW, k_scale=0.5, v_scale=3.0)
    assert_exact(world.run().out, world.expect()[0])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("kv", ["same", "fp32", "e4m3"])
def test_half_precision_errs_no_more_than_its_last_bits(dtype: str, cap: float, kv: str) -> None:
    kinds = {"same": HALF[dtype], "fp32": torch.float32, **FP8}
    world = World(layer(logit_cap=cap), LENS, NEW, dtype=HALF[dtype], kv_dtype=kinds[kv])
    got, want = world.run().out, world.expect()[0]
    assert got.dtype == HALF[dtype]
    # Weights and output are each rounded to the half type once.
    assert (got.double() - want).abs().max() < 3 * torch.finfo(HALF[dtype]).eps * want.abs().max()


def test_float32_errs_no_more_than_its_last_bits() -> None:
    world = World(layer(), LENS, NEW, dtype=torch.float32)
    assert (world.run().out.double() - world.expect()[0]).abs().max() < 2e-6


VARIANTS = {
    "plain": {},
    "mha": {"num_kv_heads": 4},
    "group_of_eight": {"num_heads": 8, "num_kv_heads": 1},
    "window": {"sliding_window_size": 20},
    "cap": {"logit_cap": 4.0},
    "wide_heads": {"head_dim": 128, "v_head_dim": 128},
    "odd_heads": {"head_dim": 72, "v_head_dim": 40},
}
MANY = (1, 32, 33, 100, 255, 257, 300, 300, 700, 40, 300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND], ids=["decode", "extend"])
def test_row_is_bitwise_the_same_alone_and_in_company(dtype: torch.dtype, variant: str, mode: ForwardMode) -> None:
    new = (1,) * len(MANY) if mode is ForwardMode.DECODE else tuple(min(n, 1 + 7 * (i % 6)) for i, n in enumerate(MANY))
    world = World(layer(**VARIANTS[variant]), MANY, new, mode, dtype=dtype, page_size=16, deterministic=True)
    whole = world.run().out
    row = 0
    for i, t in enumerate(new):
        alone = world.batch.slice(i, i + 1)
        world.backend.init_forward_metadata(alone)
        got = world.backend.forward(world.q[row : row + t].clone(), None, None, world.module, alone).out
        assert torch.equal(got, whole[row : row + t]), f"request {i}: {MANY[i]} keys, {t} queries"
        row += t
    few = world.batch.slice(3, 9)
    world.backend.init_forward_metadata(few)
    rows = slice(sum(new[:3]), sum(new[:9]))
    assert torch.equal(world.backend.forward(world.q[rows], None, None, world.module, few).out, whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_row_is_bitwise_the_same_wherever_its_slots_lie(dtype: torch.dtype, variant: str) -> None:
    outs = []
    for runs, page_size, layout in ((True, 1, "NHD"), (False, 1, "NHD"), (False, 16, "NHD"), (True, 64, "HND")):
        world = World(
            layer(**VARIANTS[variant]),
            MANY,
            (1,) * len(MANY),
            ForwardMode.DECODE,
            dtype=dtype,
            runs=runs,
            page_size=page_size,
            layout=layout,
            deterministic=True,
        )
        outs.append(world.run().out)
    assert all(torch.equal(outs[0], out) for out in outs[1:])
