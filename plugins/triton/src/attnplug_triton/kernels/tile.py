"""What every attention kernel here does with one tile of keys: find its slots, score it, take it into the softmax.

Scores are kept in base 2, ``qk · scaling · log2 e``, so that the softmax uses the hardware's exp2.
"""

# Kernel arguments are typed by Triton when it compiles; `l` is the softmax's sum in every paper on it.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-warn-return-any, no-warn-unreachable
# ruff: noqa: ANN001, ANN201, ANN202, E741, SIM108, RUF100
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def slot_entry(row, start, lo, hi, BN: tl.constexpr, ONE_PAGE: tl.constexpr, ENTRY: tl.constexpr):
    """Load where a tile's positions ``start … start + BN`` are: what the loop carries, one tile ahead.

    Positions are clamped into ``lo … hi - 1`` instead of being masked: the load stays unconditional, and a lane that
    will be masked reads a row of the same request, never an arbitrary slot, whose NaN would pass through a weight of 0.

    Args:
        row: Pointer to the request's row of the table, int32.
        start: First position of the tile; with ONE_PAGE a multiple of BN.
        lo: First position that the request may read.
        hi: One past the last; larger than lo.
        BN: Keys a tile.
        ONE_PAGE: Whether a tile never crosses a page, so that its slots are one run: a scalar is carried then.
        ENTRY: Tokens an entry of the table.
    """
    if ONE_PAGE:
        first = tl.minimum(tl.maximum(start, lo), hi - 1)
        if ENTRY == 1:
            slot = tl.load(row + first)
        else:
            slot = tl.load(row + first // ENTRY) * ENTRY + first % ENTRY
        # A tile that starts before lo still lies in lo's page. Past the end nothing is read.
        return slot.to(tl.int64) - (first - start)
    else:
        at = start + tl.arange(0, BN)
        at = tl.minimum(tl.maximum(at, lo), hi - 1)
        if ENTRY == 1:
            return tl.load(row + at).to(tl.int64)
        else:
            return tl.load(row + at // ENTRY).to(tl.int64) * ENTRY + at % ENTRY


@triton.jit
def tile_slots(entry, BN: tl.constexpr, ONE_PAGE: tl.constexpr):
    """Return the slot of each key of a tile, [BN] int64, from what ``slot_entry`` loaded."""
    if ONE_PAGE:
        return entry + tl.arange(0, BN).to(tl.int64)
    else:
        return entry


@triton.jit
def load_rows(base, slots, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows of a pool, [BN, BLOCK]; columns past WIDTH are zero. Offsets are 64-bit."""
    column = tl.arange(0, BLOCK)
    at = base + slots[:, None] * STRIDE + column[None, :]
    if WIDTH == BLOCK:
        return tl.load(at)
    else:
        return tl.load(at, mask=column[None, :] < WIDTH, other=0.0)


@triton.jit
def cap_scores(s, cap2):
    """Bend base-2 scores: ``cap · tanh(s / cap)``, with the cap in the same base."""
    # exp2 overflows to infinity for a large score, which gives 1; it vanishes for a small one, which gives -1.
    return cap2 * (1.0 - 2.0 / (1.0 + tl.exp2(s * (2.0 * LOG2E) / cap2)))


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """Return ``a · b + acc``, float32."""
    if PRECISION == "widen":
        # The interpreter multiplies the bit patterns of bfloat16; every bfloat16 is a float32.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def absorb(acc, l, m, s, v, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Take one tile into the running softmax (Milakov and Gimelshein, arXiv 1805.02867).

    Args:
        acc: [M, BDV] float32, sum of weighted values at the maximum m.
        l: [M] float32, sum of weights.
        m: [M] float32, running maximum, base 2.
        s: [M, BN] float32, scores, -inf where hidden.
        v: [BN, BDV].
        MASKED: Whether a row may see no key of the tile.
        PRECISION: Of float32 products.
    """
    top = tl.maximum(m, tl.max(s, 1))
    # A row that has seen nothing keeps -inf, and -inf - -inf is NaN.
    shift = tl.where(top == float("-inf"), 0.0, top) if MASKED else top
    p = tl.exp2(s - shift[:, None])
    alpha = tl.exp2(m - shift)
    l = l * alpha + tl.sum(p, 1)
    acc = dot(p.to(v.dtype), v, acc * alpha[:, None], PRECISION)
    return acc, l, top


@triton.jit
def close_rows(acc, l, m, sinks, HAS_SINKS: tl.constexpr):
    """Normalise: let sinks join the denominator, divide; rows that saw nothing are zero.

    Args:
        acc: [M, BDV] float32.
        l: [M] float32.
        m: [M] float32, base 2.
        sinks: [M] float32, natural logits; not read without HAS_SINKS.
        HAS_SINKS: Whether there are any.

    Returns:
        (out [M, BDV] float32, lse [M] float32, natural, without sinks; -inf where nothing was seen).
    """
    lse = tl.where(l > 0.0, m + tl.log2(l), float("-inf")) * LN2
    if HAS_SINKS:
        sink2 = sinks * LOG2E
        top = tl.maximum(m, sink2)
        scale = tl.exp2(m - top)
        total = l * scale + tl.exp2(sink2 - top)
        out = acc * (scale / total)[:, None]
    else:
        out = acc / tl.where(l > 0.0, l, 1.0)[:, None]
    return out, lse
