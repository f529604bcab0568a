"""Extend: any number of new tokens a request over its cached prefix, one loop over prefix and new tokens from the pool.

A request's (token, head of the group) pairs are packed in M, so that a tile of keys is read once for the group.
Programs find their request themselves, by a scan over the query lengths; the heaviest tiles of a request start first.
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

POOL = tl.constexpr(0)
"""All keys are in the pool, this step's too."""
POOL_AND_ROWS = tl.constexpr(1)
"""The cached prefix is in the pool; this step's keys are rows of the call."""
ROWS_ONLY = tl.constexpr(2)
"""Nothing is read from a pool."""


@triton.jit
def _sweep(
    acc,
    l,
    m,
    q,
    q_rope,
    token,
    K,
    V,
    table,
    MASK,
    cells,
    POSITIONS,
    begin,
    end,
    lo,
    hi,
    n,
    width,
    first_row,
    key_row,
    scale2,
    cap2,
    D: tl.constexpr,
    DV: tl.constexpr,
    ROPE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    K_SLOT: tl.constexpr,
    V_SLOT: tl.constexpr,
    FROM_ROWS: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    TREE: tl.constexpr,
    LATENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to positions ``begin … end``, of which ``lo … hi`` may be read; return the softmax's new state.

    From rows of the call, position p is row ``key_row + p``; from a pool, the table says.
    """
    if not FROM_ROWS:
        entry = slot_entry(table, begin, lo, hi, BN, ONE_PAGE, ENTRY)
    for start in range(begin, end, BN):
        at = start + tl.arange(0, BN)
        if FROM_ROWS:
            slots = key_row + tl.minimum(tl.maximum(at, lo), hi - 1).to(tl.int64)
        else:
            slots = tile_slots(entry, BN, ONE_PAGE)
        k = load_rows(K, slots, K_SLOT, D, BD).to(q.dtype)
        s = dot(q, tl.trans(k), tl.zeros([BM, BN], dtype=tl.float32), PRECISION)
        if ROPE > 0:
            k_rope = load_rows(K + D, slots, K_SLOT, ROPE, ROPE).to(q.dtype)
            s = dot(q_rope, tl.trans(k_rope), s, PRECISION)
        s = s * scale2
        if CAP:
            s = cap_scores(s, cap2)
        if MASKED:
            seen = visible(at, token, n, width, first_row, MASK, cells, POSITIONS, CAUSAL, WINDOW, TREE)
            # A sweep of one part of the keys must not count a position of the other.
            seen = seen & (at < hi)[None, :] & (at >= lo)[None, :]
            s = tl.where(seen, s, float("-inf"))
        if LATENT:
            v = k
        else:
            v = load_rows(V, slots, V_SLOT, DV, BDV).to(q.dtype)
        if not FROM_ROWS:
            entry = slot_entry(table, start + BN, lo, hi, BN, ONE_PAGE, ENTRY)
        acc, l, m = absorb(acc, l, m, s, v, MASKED, PRECISION)
    return acc, l, m


@triton.jit(do_not_specialize=["batch_size", "q_width", "extra_len"])
def extend_kernel(
    Q,
    Q_ROPE,
    K,
    V,
    K_NEW,
    V_NEW,
    IDS,
    ROWS,
    LENS,
    QUERY_LENS,
    KEY_INDPTR,
    MASK,
    CELLS,
    POSITIONS,
    SINKS,
    OUT,
    LSE,
    scale2,
    cap2,
    new_scale2,
    v_scale,
    batch_size,
    q_width,
    extra_len,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    ROPE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BB: tl.constexpr,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    QR_TOKEN: tl.constexpr,
    QR_HEAD: tl.constexpr,
    K_SLOT: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_HEAD: tl.constexpr,
    KN_TOKEN: tl.constexpr,
    KN_HEAD: tl.constexpr,
    VN_TOKEN: tl.constexpr,
    VN_HEAD: tl.constexpr,
    TABLE_ROW: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    SOURCE: tl.constexpr,
    UNIFORM: tl.constexpr,
    BY_INDPTR: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    TREE: tl.constexpr,
    LATENT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (KV heads × at least the batch's tiles of rows); programs past the last tile end at once."""
    G: tl.constexpr = HQ // HK
    h, tile = tl.program_id(0) % HK, tl.program_id(0) // HK
    if UNIFORM:
        width = q_width
        tiles = tl.cdiv(width * G, BM)
        b = tile // tl.maximum(tiles, 1)
        local = tile - b * tiles
        first_row = b * width
    else:
        lane = tl.arange(0, BB)
        lens = tl.load(QUERY_LENS + lane, mask=lane < batch_size, other=0).to(tl.int32)
        counts = (lens * G + BM - 1) // BM
        sums = tl.cumsum(counts, 0)
        b = tl.sum((sums <= tile).to(tl.int32), 0)
        width = tl.sum(tl.where(lane == b, lens, 0), 0)
        tiles = tl.sum(tl.where(lane == b, counts, 0), 0)
        local = tile - tl.sum(tl.where(lane < b, counts, 0), 0)
        first_row = tl.sum(tl.where(lane < b, lens, 0), 0)
    if b >= batch_size:
        return
    # Causal tiles get heavier towards the end; light ones fill the gaps at the tail of the launch.
    row = (tiles - 1 - local) * BM + tl.arange(0, BM)
    kept = row < width * G
    # Rows past the end repeat the last query, so that they see what it sees.
    token, head = tl.minimum(row // G, width - 1), h * G + row % G
    if BY_INDPTR:
        key_row = tl.load(KEY_INDPTR + b).to(tl.int64)
        n = (tl.load(KEY_INDPTR + b + 1) - key_row).to(tl.int32)
    elif SOURCE == ROWS_ONLY:
        key_row = first_row.to(tl.int64)
        n = width
    else:
        n = tl.load(LENS + b).to(tl.int32) + extra_len
        key_row = first_row.to(tl.int64) - (n - width)
    prefix = n - width
    oldest = prefix + (tiles - 1 - local) * BM // G
    newest = prefix + tl.max(token, 0)
    lo, hi = 0, n
    if WINDOW >= 0:
        # A tree's drafts share positions with their siblings, none of which is before the window of drafts.
        lo = tl.maximum((prefix if TREE != NO_TREE else oldest) - WINDOW, 0)
        if not CAUSAL and TREE == NO_TREE:
            hi = tl.minimum(hi, newest + WINDOW + 1)
    if CAUSAL and TREE == NO_TREE:
        hi = tl.minimum(hi, newest + 1)
    column = tl.arange(0, BD)
    q_row = (first_row + token).to(tl.int64)
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
    else:
        q_rope = q
    if HALF:
        # fp8 becomes fp16 in one instruction, bfloat16 in several; every stored value is exact in both.
        q, q_rope = q.to(tl.float16), q_rope.to(tl.float16)
    cells = tl.load(CELLS + b) if TREE != NO_TREE else 0
    acc = tl.zeros([BM, BDV], dtype=tl.float32)
    l = tl.zeros([BM], dtype=tl.float32)
    m = tl.full([BM], float("-inf"), dtype=tl.float32)
    if SOURCE != ROWS_ONLY:
        table = IDS + tl.load(ROWS + b) * TABLE_ROW
        stop = hi
        if SOURCE == POOL_AND_ROWS:
            stop = tl.minimum(hi, prefix)
        begin = lo // BN * BN
        readable = tl.maximum(stop, 1)
        if TREE == NO_TREE and WINDOW < 0:
            # Tiles that every row sees whole need no mask.
            limit = tl.minimum(stop, oldest + 1) if CAUSAL else stop
            whole = tl.maximum(limit, 0) // BN * BN
            acc, l, m = _sweep(
                acc,
                l,
                m,
                q,
                q_rope,
                token,
                K + h * K_HEAD,
                V + h * V_HEAD,
                table,
                MASK,
                cells,
                POSITIONS,
                begin,
                whole,
                lo,
                readable,
                n,
                width,
                first_row,
                key_row,
                scale2,
                cap2,
                D,
                DV,
                ROPE,
                BM,
                BN,
                BD,
                BDV,
                K_SLOT,
                V_SLOT,
                False,
                ONE_PAGE,
                ENTRY,
                False,
                CAUSAL,
                WINDOW,
                CAP,
                TREE,
                LATENT,
                PRECISION,
            )
            begin = whole
        acc, l, m = _sweep(
            acc,
            l,
            m,
            q,
            q_rope,
            token,
            K + h * K_HEAD,
            V + h * V_HEAD,
            table,
            MASK,
            cells,
            POSITIONS,
            begin,
            stop,
            lo,
            readable,
            n,
            width,
            first_row,
            key_row,
            scale2,
            cap2,
            D,
            DV,
            ROPE,
            BM,
            BN,
            BD,
            BDV,
            K_SLOT,
            V_SLOT,
            False,
            ONE_PAGE,
            ENTRY,
            True,
            CAUSAL,
            WINDOW,
            CAP,
            TREE,
            LATENT,
            PRECISION,
        )
    acc = acc * v_scale
    if SOURCE != POOL:
        first = lo
        if SOURCE == POOL_AND_ROWS:
            first = tl.maximum(lo, prefix)
        acc, l, m = _sweep(
            acc,
            l,
            m,
            q,
            q_rope,
            token,
            K_NEW + h * KN_HEAD,
            V_NEW + h * VN_HEAD,
            IDS,
            MASK,
            cells,
            POSITIONS,
            first,
            hi,
            first,
            hi,
            n,
            width,
            first_row,
            key_row,
            new_scale2,
            cap2,
            D,
            DV,
            ROPE,
            BM,
            BN,
            BD,
            BDV,
            KN_TOKEN,
            VN_TOKEN,
            True,
            ONE_PAGE,
            ENTRY,
            True,
            CAUSAL,
            WINDOW,
            CAP,
            TREE,
            LATENT,
            PRECISION,
        )
    sinks = tl.load(SINKS + head) if HAS_SINKS else m
    out, lse = close_rows(acc, l, m, sinks, HAS_SINKS)
    place = q_row * HQ + head
    value = tl.arange(0, BDV)
    tl.store(
        OUT + place[:, None] * DV + value[None, :],
        out.to(OUT.dtype.element_ty),
        mask=kept[:, None] & (value[None, :] < DV),
    )
    if HAS_LSE:
        tl.store(LSE + place, lse, mask=kept)
