"""Decode and verify: the same few queries for each request, keys split over programs, partial results merged after.

All rows of a KV head's group, and all queries of a request, are packed in M, so that each key is read once. A program
walks a contiguous run of tiles; the index of the next tile is carried, so that the pipeline is as deep as its stages.
The loop is a plain ``range``: with ``tl.range(num_stages=…)`` the index load too becomes an asynchronous copy, which
every iteration then waits for (Triton 3.6, read from the compiled code: one buffer in flight instead of two).
"""

# Kernel arguments are typed by Triton when it compiles; `l` is the softmax's sum in every paper on it.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-warn-return-any, no-warn-unreachable
# ruff: noqa: ANN001, ANN201, ANN202, E741, SIM108, RUF100
from __future__ import annotations

import triton
import triton.language as tl

from .tile import absorb, cap_scores, close_rows, dot, load_rows, slot_entry, tile_slots
from .visibility import NO_TREE, visible


@triton.jit
def _walk(
    Q,
    Q_ROPE,
    K,
    V,
    IDS,
    ROWS,
    LENS,
    MASK,
    CELLS,
    POSITIONS,
    b,
    h,
    row,
    first_tile,
    last_tile,
    scale2,
    cap2,
    extra_len,
    HQ: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    ROPE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    QR_TOKEN: tl.constexpr,
    QR_HEAD: tl.constexpr,
    K_SLOT: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_HEAD: tl.constexpr,
    TABLE_ROW: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    TREE: tl.constexpr,
    LATENT: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend one request's rows to tiles ``first_tile … last_tile``; return (acc, l, m) of the running softmax."""
    token, head = row // G, h * G + row % G
    kept = row < W * G
    n = tl.load(LENS + b).to(tl.int32) + extra_len
    lo = tl.maximum(n - W - WINDOW, 0) if WINDOW >= 0 else 0
    hi = tl.maximum(n, 1)
    start = lo // BN * BN
    column = tl.arange(0, BD)
    q_row = (b * W + token).to(tl.int64)
    q = tl.load(
        Q + q_row[:, None] * Q_TOKEN + head[:, None] * Q_HEAD + column[None, :],
        mask=kept[:, None] & (column[None, :] < D),
        other=0.0,
    )
    if ROPE > 0:
        rope = tl.arange(0, ROPE)
        q_rope = tl.load(
            Q_ROPE + q_row[:, None] * QR_TOKEN + head[:, None] * QR_HEAD + rope[None, :], mask=kept[:, None], other=0.0
        )
    if HALF:
        # fp8 becomes fp16 in one instruction, bfloat16 in several; every stored value is exact in both.
        q = q.to(tl.float16)
        q_rope = q_rope.to(tl.float16) if ROPE > 0 else q
    table = IDS + tl.load(ROWS + b) * TABLE_ROW
    cells = tl.load(CELLS + b) if TREE != NO_TREE else 0
    acc = tl.zeros([BM, BDV], dtype=tl.float32)
    l = tl.zeros([BM], dtype=tl.float32)
    m = tl.full([BM], float("-inf"), dtype=tl.float32)
    entry = slot_entry(table, start + first_tile * BN, lo, hi, BN, ONE_PAGE, ENTRY)
    for tile in range(first_tile, last_tile):
        slots = tile_slots(entry, BN, ONE_PAGE)
        at = start + tile * BN + tl.arange(0, BN)
        k = load_rows(K + h * K_HEAD, slots, K_SLOT, D, BD).to(q.dtype)
        s = dot(q, tl.trans(k), tl.zeros([BM, BN], dtype=tl.float32), PRECISION)
        if ROPE > 0:
            k_rope = load_rows(K + h * K_HEAD + D, slots, K_SLOT, ROPE, ROPE).to(q.dtype)
            s = dot(q_rope, tl.trans(k_rope), s, PRECISION)
        s = s * scale2
        if CAP:
            s = cap_scores(s, cap2)
        seen = visible(at, token, n, W, b * W, MASK, cells, POSITIONS, CAUSAL and W > 1, WINDOW, TREE)
        s = tl.where(seen, s, float("-inf"))
        if LATENT:
            v = k
        else:
            v = load_rows(V + h * V_HEAD, slots, V_SLOT, DV, BDV).to(q.dtype)
        entry = slot_entry(table, start + (tile + 1) * BN, lo, hi, BN, ONE_PAGE, ENTRY)
        acc, l, m = absorb(acc, l, m, s, v, W > 1, PRECISION)
    return acc, l, m


@triton.jit
def _store(
    acc,
    l,
    m,
    OUT,
    LSE,
    PART,
    PART_LSE,
    SINKS,
    b,
    h,
    row,
    slot,
    final,
    v_scale,
    HQ: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Write a program's rows: the answer where it saw every key, else its share and base-2 LSE."""
    token, head = row // G, h * G + row % G
    kept = row < W * G
    column = tl.arange(0, BDV)
    inside = kept[:, None] & (column[None, :] < DV)
    acc = acc * v_scale
    if final:
        sinks = tl.load(SINKS + head, mask=kept, other=0.0) if HAS_SINKS else m
        out, lse = close_rows(acc, l, m, sinks, HAS_SINKS)
        place = (b * W + token).to(tl.int64) * HQ + head
        tl.store(OUT + place[:, None] * DV + column[None, :], out.to(OUT.dtype.element_ty), mask=inside)
        if HAS_LSE:
            tl.store(LSE + place, lse, mask=kept)
    else:
        out, lse = close_rows(acc, l, m, m, False)
        place = (slot * W + token).to(tl.int64) * HQ + head
        tl.store(PART + place[:, None] * DV + column[None, :], out, mask=inside)
        tl.store(PART_LSE + place, lse, mask=kept)


@triton.jit(do_not_specialize=["batch_size", "extra_len", "splits", "tiles_a_split"])
def decode_split_kernel(
    Q,
    Q_ROPE,
    K,
    V,
    IDS,
    ROWS,
    LENS,
    MASK,
    CELLS,
    POSITIONS,
    SINKS,
    OUT,
    LSE,
    PART,
    PART_LSE,
    scale2,
    cap2,
    v_scale,
    batch_size,
    extra_len,
    splits,
    tiles_a_split,
    HQ: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    ROPE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    QR_TOKEN: tl.constexpr,
    QR_HEAD: tl.constexpr,
    K_SLOT: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_HEAD: tl.constexpr,
    TABLE_ROW: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    TREE: tl.constexpr,
    LATENT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    SINGLE: tl.constexpr,
    FIXED: tl.constexpr,
    PDL: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (KV heads × row blocks, splits, requests): a request's tiles in equal shares, or in shares of fixed size."""
    if PDL:
        # First thing: the merge's launch then overlaps this kernel, and waits by itself.
        tl.extra.cuda.gdc_launch_dependents()
    blocks: tl.constexpr = (W * G + BM - 1) // BM
    h, b, split = tl.program_id(0) // blocks, tl.program_id(2), tl.program_id(1)
    row = tl.program_id(0) % blocks * BM + tl.arange(0, BM)
    n = tl.load(LENS + b).to(tl.int32) + extra_len
    start = tl.maximum(n - W - WINDOW, 0) // BN * BN if WINDOW >= 0 else 0
    tiles = tl.cdiv(n - start, BN)
    if SINGLE:
        first, last = 0, tiles
    elif FIXED:
        first = split * tiles_a_split
        last = tl.minimum(first + tiles_a_split, tiles)
        if first >= tiles:
            # The merge counts shares by length, and reads none of these.
            return
    else:
        first, last = split * tiles // splits, (split + 1) * tiles // splits
    acc, l, m = _walk(
        Q,
        Q_ROPE,
        K,
        V,
        IDS,
        ROWS,
        LENS,
        MASK,
        CELLS,
        POSITIONS,
        b,
        h,
        row,
        first,
        last,
        scale2,
        cap2,
        extra_len,
        HQ,
        G,
        W,
        D,
        DV,
        ROPE,
        BM,
        BN,
        BD,
        BDV,
        Q_TOKEN,
        Q_HEAD,
        QR_TOKEN,
        QR_HEAD,
        K_SLOT,
        K_HEAD,
        V_SLOT,
        V_HEAD,
        TABLE_ROW,
        ONE_PAGE,
        ENTRY,
        CAUSAL,
        WINDOW,
        CAP,
        TREE,
        LATENT,
        HALF,
        PRECISION,
    )
    _store(
        acc,
        l,
        m,
        OUT,
        LSE,
        PART,
        PART_LSE,
        SINKS,
        b,
        h,
        row,
        b * splits + split,
        SINGLE,
        v_scale,
        HQ,
        G,
        W,
        DV,
        BDV,
        HAS_SINKS,
        HAS_LSE,
    )


@triton.jit
def unit_totals(
    LENS,
    batch_size,
    extra_len,
    W: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    EXTRA: tl.constexpr,
    BB: tl.constexpr,
):
    """Return (inclusive sums [BB], costs [BB]) of each request's cost in units: its tiles, and EXTRA if it has any."""
    lane = tl.arange(0, BB)
    n = tl.load(LENS + lane, mask=lane < batch_size, other=0).to(tl.int32)
    n = tl.where(lane < batch_size, n + extra_len, 0)
    start = tl.maximum(n - W - WINDOW, 0) // BN * BN if WINDOW >= 0 else n * 0
    tiles = (n - start + BN - 1) // BN
    cost = tl.where(tiles > 0, tiles + EXTRA, 0)
    return tl.cumsum(cost, 0), cost


@triton.jit(do_not_specialize=["batch_size", "extra_len", "groups"])
def decode_stream_kernel(
    Q,
    Q_ROPE,
    K,
    V,
    IDS,
    ROWS,
    LENS,
    MASK,
    CELLS,
    POSITIONS,
    SINKS,
    OUT,
    LSE,
    PART,
    PART_LSE,
    scale2,
    cap2,
    v_scale,
    batch_size,
    extra_len,
    groups,
    HQ: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    ROPE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    QR_TOKEN: tl.constexpr,
    QR_HEAD: tl.constexpr,
    K_SLOT: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_HEAD: tl.constexpr,
    TABLE_ROW: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    TREE: tl.constexpr,
    LATENT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    EXTRA: tl.constexpr,
    BB: tl.constexpr,
    PDL: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (KV heads × row blocks, groups): all tiles of the batch, request after request, in equal shares (stream-K).

    Each program finds its share itself, from the lengths: no plan, and no length is ever read by the host. A share of
    request b in group g is partial ``g + b``, which is unique because both only grow along the line of tiles.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    blocks: tl.constexpr = (W * G + BM - 1) // BM
    h, group = tl.program_id(0) // blocks, tl.program_id(1)
    row = tl.program_id(0) % blocks * BM + tl.arange(0, BM)
    sums, costs = unit_totals(LENS, batch_size, extra_len, W, BN, WINDOW, EXTRA, BB)
    total = tl.max(sums, 0).to(tl.int64)
    # No group is left empty, or the merge would read what nobody wrote.
    shares = tl.minimum(groups, total)
    if group >= shares:
        return
    unit, end = (group * total // shares).to(tl.int32), ((group + 1) * total // shares).to(tl.int32)
    lane = tl.arange(0, BB)
    while unit < end:
        b = tl.sum((sums <= unit).to(tl.int32), 0)
        past = tl.sum(tl.where(lane == b, sums, 0), 0)
        cost = tl.sum(tl.where(lane == b, costs, 0), 0)
        tiles = cost - EXTRA
        first = unit - (past - cost)
        unit = tl.minimum(end, past)
        last = tl.minimum(unit - (past - cost), tiles)
        # A share may lie in the fixed cost alone; it must not touch the table.
        if first < last:
            acc, l, m = _walk(
                Q,
                Q_ROPE,
                K,
                V,
                IDS,
                ROWS,
                LENS,
                MASK,
                CELLS,
                POSITIONS,
                b,
                h,
                row,
                first,
                last,
                scale2,
                cap2,
                extra_len,
                HQ,
                G,
                W,
                D,
                DV,
                ROPE,
                BM,
                BN,
                BD,
                BDV,
                Q_TOKEN,
                Q_HEAD,
                QR_TOKEN,
                QR_HEAD,
                K_SLOT,
                K_HEAD,
                V_SLOT,
                V_HEAD,
                TABLE_ROW,
                ONE_PAGE,
                ENTRY,
                CAUSAL,
                WINDOW,
                CAP,
                TREE,
                LATENT,
                HALF,
                PRECISION,
            )
            _store(
                acc,
                l,
                m,
                OUT,
                LSE,
                PART,
                PART_LSE,
                SINKS,
                b,
                h,
                row,
                group + b,
                (first == 0) & (last == tiles),
                v_scale,
                HQ,
                G,
                W,
                DV,
                BDV,
                HAS_SINKS,
                HAS_LSE,
            )
