"""Writing of a step's keys and values into a pool: scale, saturate, convert and scatter, both in one launch."""

# Kernel arguments are typed by Triton when it compiles; `l` is the softmax's sum in every paper on it.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-warn-return-any, no-warn-unreachable
# ruff: noqa: ANN001, ANN201, ANN202, E741, SIM108, RUF100
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _move(
    SOURCE,
    TARGET,
    slots,
    row,
    column,
    TOKEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOT: tl.constexpr,
    kept,
    scale,
    SCALED: tl.constexpr,
    LIMIT: tl.constexpr,
):
    inside = kept[:, None] & (column[None, :] < WIDTH)
    x = tl.load(SOURCE + row[:, None] * TOKEN + column[None, :], mask=inside, other=0.0)
    if SCALED:
        x = x.to(tl.float32) / scale
    if LIMIT > 0:
        # fp8 saturates; a bare cast may give NaN or infinity. What is NaN already stays so.
        x = tl.clamp(x.to(tl.float32), -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    tl.store(TARGET + slots[:, None] * SLOT + column[None, :], x.to(TARGET.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def kv_write_kernel(
    K,
    V,
    K_POOL,
    V_POOL,
    SLOTS,
    k_scale,
    v_scale,
    tokens,
    K_TOKEN: tl.constexpr,
    V_TOKEN: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    K_SLOT: tl.constexpr,
    V_SLOT: tl.constexpr,
    K_SCALED: tl.constexpr,
    V_SCALED: tl.constexpr,
    LIMIT: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
):
    """Grid (tokens / BT, columns / BW of the wider of both)."""
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    column = tl.program_id(1) * BW + tl.arange(0, BW)
    kept = row < tokens
    slots = tl.load(SLOTS + row, mask=kept, other=0).to(tl.int64)
    row = row.to(tl.int64)
    _move(K, K_POOL, slots, row, column, K_TOKEN, K_WIDTH, K_SLOT, kept, k_scale, K_SCALED, LIMIT)
    _move(V, V_POOL, slots, row, column, V_TOKEN, V_WIDTH, V_SLOT, kept, v_scale, V_SCALED, LIMIT)


def write_kv(
    k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor, *, k_scale: float = 1.0, v_scale: float = 1.0
) -> None:
    """Store ``k / k_scale`` and ``v / v_scale`` at slots; rows of padding may share one slot, and one of them stays.

    Args:
        k: [T, Hk, D], any float dtype; heads and columns contiguous, tokens at any stride.
        v: [T, Hk, Dv] likewise.
        k_pool: [slots, Hk, D], heads and columns contiguous, written.
        v_pool: [slots, Hk, Dv] likewise.
        slots: [T] int64, device.
        k_scale: What a reader multiplies keys by.
        v_scale: What a reader multiplies values by.
    """
    tokens = k.shape[0]
    if tokens == 0:
        return
    k, v = _packed(k), _packed(v)
    k_width, v_width = k.shape[1] * k.shape[2], v.shape[1] * v.shape[2]
    fp8 = k_pool.dtype.itemsize == 1
    width = triton.next_power_of_2(max(k_width, v_width))
    columns = min(width, 1024)
    rows = max(1, min(4096 // columns, triton.next_power_of_2(triton.cdiv(tokens, 132))))
    grid = (triton.cdiv(tokens, rows), width // columns)
    kv_write_kernel[grid](
        k,
        v,
        k_pool,
        v_pool,
        slots,
        k_scale,
        v_scale,
        tokens,
        K_TOKEN=k.stride(0),
        V_TOKEN=v.stride(0),
        K_WIDTH=k_width,
        V_WIDTH=v_width,
        K_SLOT=k_pool.stride(0),
        V_SLOT=v_pool.stride(0),
        K_SCALED=k_scale != 1.0,
        V_SCALED=v_scale != 1.0,
        LIMIT=torch.finfo(k_pool.dtype).max if fp8 else 0.0,
        BT=rows,
        BW=columns,
        num_warps=4,
    )


def _packed(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
