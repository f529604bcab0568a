"""Merging of a request's partial results: a second launch, one program a row and head.

A second launch beats a merge by the last arriver: at 33 splits 41 against 46 to 52 µs (H200, Llama B1 32k), and its
own start is hidden by programmatic dependent launch.
"""

# Kernel arguments are typed by Triton when it compiles; `l` is the softmax's sum in every paper on it.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-warn-return-any, no-warn-unreachable
# ruff: noqa: ANN001, ANN201, ANN202, E741, SIM108, RUF100
from __future__ import annotations

import triton
import triton.language as tl

from .decode import unit_totals
from .tile import LN2, LOG2E

EQUAL = tl.constexpr(0)
FIXED = tl.constexpr(1)
STREAM = tl.constexpr(2)


@triton.jit(do_not_specialize=["batch_size", "extra_len", "splits", "tiles_a_split"])
def merge_kernel(
    PART,
    PART_LSE,
    LENS,
    SINKS,
    OUT,
    LSE,
    batch_size,
    extra_len,
    splits,
    tiles_a_split,
    HQ: tl.constexpr,
    W: tl.constexpr,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    EXTRA: tl.constexpr,
    BB: tl.constexpr,
    BS: tl.constexpr,
    SCHEDULE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (query heads, query rows). Partials of request b lie one after another, in the order of their keys."""
    if PDL:
        # Unconditional: a program that returned without waiting could let this kernel end before the one it reads.
        tl.extra.cuda.gdc_wait()
    head, row = tl.program_id(0), tl.program_id(1)
    b, token = row // W, row % W
    n = tl.load(LENS + b).to(tl.int32) + extra_len
    start = tl.maximum(n - W - WINDOW, 0) // BN * BN if WINDOW >= 0 else 0
    tiles = tl.cdiv(n - start, BN)
    if SCHEDULE == STREAM:
        sums, costs = unit_totals(LENS, batch_size, extra_len, W, BN, WINDOW, EXTRA, BB)
        total = tl.max(sums, 0).to(tl.int64)
        shares = tl.maximum(tl.minimum(splits, total), 1)
        lane = tl.arange(0, BB)
        unit = tl.sum(tl.where(lane == b, sums - costs, 0), 0).to(tl.int64)
        total = tl.maximum(total, 1)
        # Unit u is in group ((u + 1) · shares - 1) // total.
        first_group = ((unit + 1) * shares - 1) // total
        count = (((unit + tiles) * shares - 1) // total - first_group + 1).to(tl.int32)
        first = (first_group + b).to(tl.int32)
        count = tl.where(tiles > 0, count, 0)
        if count == 1:
            # One program saw every key, and wrote the answer.
            return
    elif SCHEDULE == FIXED:
        first, count = b * splits, tl.cdiv(tiles, tiles_a_split)
    else:
        first, count = b * splits, splits
    column, part = tl.arange(0, BDV), tl.arange(0, BS)
    acc = tl.zeros([BDV], dtype=tl.float32)
    l = tl.full([], 0.0, dtype=tl.float32)
    m = tl.full([], float("-inf"), dtype=tl.float32)
    for done in range(0, count, BS):
        share = done + part
        place = ((first + share) * W + token).to(tl.int64) * HQ + head
        lse = tl.load(PART_LSE + place, mask=share < count, other=float("-inf")) * LOG2E
        # A share without keys has no values worth reading.
        held = lse > float("-inf")
        o = tl.load(
            PART + place[:, None] * DV + column[None, :], mask=held[:, None] & (column[None, :] < DV), other=0.0
        )
        top = tl.maximum(m, tl.max(lse, 0))
        shift = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(lse - shift)
        alpha = tl.exp2(m - shift)
        acc = acc * alpha + tl.sum(o * weight[:, None], 0)
        l = l * alpha + tl.sum(weight, 0)
        m = top
    place = row.to(tl.int64) * HQ + head
    if HAS_LSE:
        tl.store(LSE + place, tl.where(l > 0.0, m + tl.log2(l), float("-inf")) * LN2)
    if HAS_SINKS:
        sink2 = tl.load(SINKS + head) * LOG2E
        top = tl.maximum(m, sink2)
        scale = tl.exp2(m - top)
        out = acc * (scale / (l * scale + tl.exp2(sink2 - top)))
    else:
        out = acc / tl.where(l > 0.0, l, 1.0)
    tl.store(OUT + place * DV + column, out.to(OUT.dtype.element_ty), mask=column < DV)
