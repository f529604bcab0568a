"""Extend on Hopper, in Gluon: a producer brings pages by TMA, two warpgroups score and sum, each its own 64 rows.

The plain twin, for every other card and shape and for the interpreter, is ``extend``: same rows, same result. A
consumer goes from the newest keys backwards, so that only its first tile needs a causal mask, and sums the values of
one tile while it scores the next. Tiles end where a page of 64 does, so that the causal edge of a program's rows, at
most 64 positions long, never leaves the first.
"""

# Kernel arguments are typed by Triton when it compiles; `l` is the softmax's sum in every paper on it.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-warn-return-any, no-warn-unreachable
# ruff: noqa: ANN001, ANN201, ANN202, E741, SIM108, RUF100
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(64)
"""Rows a consumer; two consumers a program."""
KEYS = gl.constexpr(128)
PAGE = gl.constexpr(64)
"""Keys of one TMA load: what surely lies in one page."""
STAGES = gl.constexpr(2)


@gluon.jit
def _load_tile(desc, places, full, free, table, h, end, j, D: gl.constexpr):
    stage = j % STAGES
    start = end - (j + 1) * KEYS
    # The lowest tile may start before position 0; its lower half is then loaded twice, and masked.
    low = gl.load(table + gl.maximum(start, 0))
    high = gl.load(table + start + PAGE)
    mbarrier.wait(free.index(stage), ((j // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), KEYS * D * 2)
    tma.async_copy_global_to_shared(desc, [low, h * D], full.index(stage), places.index(stage).slice(0, PAGE))
    tma.async_copy_global_to_shared(desc, [high, h * D], full.index(stage), places.index(stage).slice(PAGE, PAGE))


@gluon.jit
def _produce(k_desc, v_desc, k_tiles, v_tiles, k_full, v_full, k_free, v_free, table, h, end, tiles, D: gl.constexpr):
    # A tile's keys are free again before the values of the one before it, so keys are loaded a tile ahead of values.
    for j in range(tiles + 1):
        if j < tiles:
            _load_tile(k_desc, k_tiles, k_full, k_free, table, h, end, j, D)
        if j > 0:
            _load_tile(v_desc, v_tiles, v_full, v_free, table, h, end, j - 1, D)


@gluon.jit
def _next_tile(
    q_tile,
    k_tiles,
    v_tiles,
    k_full,
    v_full,
    k_free,
    v_free,
    j,
    acc,
    l,
    m,
    weights,
    zeros,
    scale2,
    end,
    LOWEST: gl.constexpr,
):
    """Score tile j while the values of tile j - 1 are summed; return (acc, l, m, weights) of the running softmax.

    The weights are converted last: an operand that is made while the product of the one before is in flight serialises
    every product. ptxas moves the end of the values' product above most of the softmax; held below it by a wait, which
    ends the compiler's block, 8k of prefill took 970 µs instead of 947 (H200): the other warpgroup fills the gap.
    """
    s_layout: gl.constexpr = zeros.type.layout
    stage = j % STAGES
    before = (j - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (j // STAGES) & 1)
    s = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((j - 1) // STAGES) & 1)
    acc = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_free.index(stage), count=1)
    if LOWEST:
        # The lowest tile may start before position 0.
        at = end - (j + 1) * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, s_layout))
        s = gl.where((at >= 0)[None, :], s, float("-inf"))
    top = gl.maximum(m, gl.max(s, 1) * scale2)
    p = gl.exp2(s * scale2 - top[:, None])
    alpha = gl.exp2(m - top)
    l = l * alpha + gl.sum(p, 1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_free.index(before), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, l, top, gl.convert_layout(p.to(weights.dtype), weights.type.layout)


@gluon.jit
def _consume(
    which: gl.constexpr,
    q_tiles,
    k_tiles,
    v_tiles,
    k_full,
    v_full,
    k_free,
    v_free,
    Q,
    SINKS,
    OUT,
    LSE,
    scale2,
    v_scale,
    h,
    tile_row,
    width,
    first_row,
    prefix,
    n,
    end,
    tiles,
    HQ: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    Q_TOKEN: gl.constexpr,
    Q_HEAD: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=2)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, load_layout)
    # Rows past the request's end repeat its last query; what they give is not stored.
    row = tile_row + which * ROWS + gl.arange(0, ROWS, layout=row_layout)
    token = gl.minimum(row // G, width - 1)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, load_layout))
    place = (first_row + token).to(gl.int64)[:, None] * Q_TOKEN + (h * G + row % G)[:, None] * Q_HEAD
    q_tile = q_tiles.index(which)
    q_tile.store(gl.load(Q + place + column[None, :]))
    fence_async_shared()

    row = tile_row + which * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout))
    at = prefix + gl.minimum(row // G, width - 1)
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, s_layout))
    zeros = gl.zeros([ROWS, KEYS], gl.float32, s_layout)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_free.index(0), count=1)
    place_of = end - KEYS + key
    seen = (place_of >= 0)[None, :] & (place_of < n)[None, :]
    if CAUSAL:
        seen = seen & (place_of[None, :] <= at[:, None])
    s = gl.where(seen, s, float("-inf"))
    # A row may see no key of this tile: a finite floor keeps -inf - -inf, which is NaN, away; its weights are 0.
    m = gl.maximum(gl.max(s, 1) * scale2, -1.0e30)
    p = gl.exp2(s * scale2 - m[:, None])
    l = gl.sum(p, 1)
    acc = gl.zeros([ROWS, D], gl.float32, acc_layout)
    weights = gl.convert_layout(p.to(Q.dtype.element_ty), p_layout)
    for j in range(1, tiles - 1):
        acc, l, m, weights = _next_tile(
            q_tile,
            k_tiles,
            v_tiles,
            k_full,
            v_full,
            k_free,
            v_free,
            j,
            acc,
            l,
            m,
            weights,
            zeros,
            scale2,
            end,
            False,
        )
    if tiles > 1:
        # Apart from the loop, so that only this tile is masked, and without a branch in the loop.
        acc, l, m, weights = _next_tile(
            q_tile,
            k_tiles,
            v_tiles,
            k_full,
            v_full,
            k_free,
            v_free,
            tiles - 1,
            acc,
            l,
            m,
            weights,
            zeros,
            scale2,
            end,
            True,
        )
    last = (tiles - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((tiles - 1) // STAGES) & 1)
    acc = warpgroup_mma(weights, v_tiles.index(last), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])

    row = tile_row + which * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc_layout))
    head = h * G + row % G
    kept = row < width * G
    place = (first_row + row // G).to(gl.int64) * HQ + head
    m = gl.convert_layout(m, gl.SliceLayout(1, acc_layout))
    l = gl.convert_layout(l, gl.SliceLayout(1, acc_layout))
    if HAS_LSE:
        gl.store(LSE + place, (m + gl.log2(l)) * 0.6931471805599453, mask=kept)
    if HAS_SINKS:
        sink2 = gl.load(SINKS + head) * 1.4426950408889634
        top = gl.maximum(m, sink2)
        scale = gl.exp2(m - top)
        factor = scale / (l * scale + gl.exp2(sink2 - top))
    else:
        factor = 1.0 / l
    out = acc * (factor * v_scale)[:, None]
    column = gl.arange(0, D, layout=gl.SliceLayout(0, acc_layout))
    gl.store(OUT + place[:, None] * D + column[None, :], out.to(OUT.dtype.element_ty), mask=kept[:, None])


@gluon.jit(do_not_specialize=["batch_size", "extra_len", "q_width"])
def extend_hopper_kernel(
    k_desc,
    v_desc,
    Q,
    IDS,
    TABLE_ROWS,
    LENS,
    QUERY_LENS,
    SINKS,
    OUT,
    LSE,
    scale2,
    v_scale,
    batch_size,
    extra_len,
    q_width,
    HQ: gl.constexpr,
    HK: gl.constexpr,
    D: gl.constexpr,
    BB: gl.constexpr,
    Q_TOKEN: gl.constexpr,
    Q_HEAD: gl.constexpr,
    TABLE_ROW: gl.constexpr,
    UNIFORM: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    """Grid (KV heads × the most tiles of a request, requests); a request's heaviest tile starts first."""
    G: gl.constexpr = HQ // HK
    h = gl.program_id(0) % HK
    b = gl.program_id(1)
    if UNIFORM:
        width = q_width
        first_row = b * q_width
    else:
        lane = gl.arange(0, BB, layout=gl.BlockedLayout([1], [32], [4], [0]))
        lens = gl.load(QUERY_LENS + lane, mask=lane < batch_size, other=0)
        width = gl.load(QUERY_LENS + b)
        first_row = gl.sum(gl.where(lane < b, lens, 0), 0)
    n = gl.load(LENS + b).to(gl.int32) + extra_len
    local = (width * G + 2 * ROWS - 1) // (2 * ROWS) - 1 - gl.program_id(0) // HK
    # A request that counts fewer keys than queries breaks the contract; waiting for its keys would never end.
    if (local >= 0) & (n >= width):
        tile_row = local * 2 * ROWS
        prefix = n - width
        last = n
        if CAUSAL:
            last = gl.minimum(n, prefix + (tile_row + 2 * ROWS - 1) // G + 1)
        end = (last + PAGE - 1) // PAGE * PAGE
        tiles = (end + KEYS - 1) // KEYS
        table = IDS + gl.load(TABLE_ROWS + b) * TABLE_ROW

        shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        dtype: gl.constexpr = Q.dtype.element_ty
        q_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, D], shared)
        k_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], shared)
        v_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], shared)
        flag: gl.constexpr = mbarrier.MBarrierLayout()
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], flag)
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(k_free.index(i), count=2)
            mbarrier.init(v_free.index(i), count=2)
        fence_async_shared()
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        0,
                        q_tiles,
                        k_tiles,
                        v_tiles,
                        k_full,
                        v_full,
                        k_free,
                        v_free,
                        Q,
                        SINKS,
                        OUT,
                        LSE,
                        scale2,
                        v_scale,
                        h,
                        tile_row,
                        width,
                        first_row,
                        prefix,
                        n,
                        end,
                        tiles,
                        HQ,
                        G,
                        D,
                        Q_TOKEN,
                        Q_HEAD,
                        CAUSAL,
                        HAS_SINKS,
                        HAS_LSE,
                    ),
                ),
                (
                    _consume,
                    (
                        1,
                        q_tiles,
                        k_tiles,
                        v_tiles,
                        k_full,
                        v_full,
                        k_free,
                        v_free,
                        Q,
                        SINKS,
                        OUT,
                        LSE,
                        scale2,
                        v_scale,
                        h,
                        tile_row,
                        width,
                        first_row,
                        prefix,
                        n,
                        end,
                        tiles,
                        HQ,
                        G,
                        D,
                        Q_TOKEN,
                        Q_HEAD,
                        CAUSAL,
                        HAS_SINKS,
                        HAS_LSE,
                    ),
                ),
                (
                    _produce,
                    (k_desc, v_desc, k_tiles, v_tiles, k_full, v_full, k_free, v_free, table, h, end, tiles, D),
                ),
            ],
            [4, 4],
            [240, 24],
        )
