"""Absorbed MLA decode on Hopper, in Gluon: 64 heads a program, two warpgroups that sum half of the latent each.

The first warpgroup also scores, and hands weights and rescaling factors to the second through shared memory; a producer
brings pages by TMA. What a tile holds is waited for and given back in three parts, latent left, latent right and rope,
so that the next load starts as soon as its place is free. The plain twin is ``decode``.
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

HEADS = gl.constexpr(64)
"""Rows of M."""
KEYS = gl.constexpr(64)
"""Keys a tile, which lie in one page."""
HALF = gl.constexpr(256)
ROPE = gl.constexpr(64)
STAGES = gl.constexpr(2)


@gluon.jit
def _produce(half_desc, rope_desc, left, right, rope, full, free, table, first, last):
    for i in range(last - first):
        stage = i % STAGES
        turn = (i // STAGES) & 1
        slot = gl.load(table + (last - 1 - i) * KEYS)
        mbarrier.wait(free.index(stage), turn ^ 1)
        mbarrier.expect(full.index(stage), KEYS * HALF * 2)
        tma.async_copy_global_to_shared(half_desc, [slot, 0], full.index(stage), left.index(stage))
        mbarrier.wait(free.index(STAGES + stage), turn ^ 1)
        mbarrier.expect(full.index(STAGES + stage), KEYS * HALF * 2)
        tma.async_copy_global_to_shared(half_desc, [slot, HALF], full.index(STAGES + stage), right.index(stage))
        mbarrier.wait(free.index(2 * STAGES + stage), turn ^ 1)
        mbarrier.expect(full.index(2 * STAGES + stage), KEYS * ROPE * 2)
        tma.async_copy_global_to_shared(rope_desc, [slot, 2 * HALF], full.index(2 * STAGES + stage), rope.index(stage))


@gluon.jit
def _issue_scores(q_left, q_right, q_rope, left, right, rope, full, zeros, i):
    """Wait for the three parts of a tile and start its scores; one product is outstanding for each part."""
    stage = i % STAGES
    turn = (i // STAGES) & 1
    mbarrier.wait(full.index(stage), turn)
    s = warpgroup_mma(q_left, left.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(full.index(STAGES + stage), turn)
    s = warpgroup_mma(q_right, right.index(stage).permute((1, 0)), s, is_async=True)
    mbarrier.wait(full.index(2 * STAGES + stage), turn)
    return warpgroup_mma(q_rope, rope.index(stage).permute((1, 0)), s, is_async=True)


@gluon.jit
def _store(
    acc, l, m, OUT, PART, PART_LSE, v_scale, b, split, splits, head0, column0, HQ: gl.constexpr, SINGLE: gl.constexpr
):
    layout: gl.constexpr = acc.type.layout
    head = head0 + gl.arange(0, HEADS, layout=gl.SliceLayout(1, layout))
    column = column0 + gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
    value = acc * (v_scale / l)[:, None]
    if SINGLE:
        place = (b * HQ + head).to(gl.int64)
        gl.store(OUT + place[:, None] * (2 * HALF) + column[None, :], value.to(OUT.dtype.element_ty))
    else:
        place = ((b * splits + split) * HQ + head).to(gl.int64)
        gl.store(PART + place[:, None] * (2 * HALF) + column[None, :], value)
        gl.store(PART_LSE + place, (m + gl.log2(l)) * 0.6931471805599453, mask=column0 == 0)


@gluon.jit
def _score_and_sum_left(
    Q,
    Q_ROPE,
    OUT,
    LSE,
    PART,
    PART_LSE,
    q_left,
    q_right,
    q_rope,
    left,
    right,
    rope,
    weights,
    factors,
    full,
    free,
    handed,
    taken,
    scale2,
    v_scale,
    b,
    n,
    split,
    splits,
    head0,
    first,
    last,
    HQ: gl.constexpr,
    Q_TOKEN: gl.constexpr,
    Q_HEAD: gl.constexpr,
    QR_TOKEN: gl.constexpr,
    QR_HEAD: gl.constexpr,
    SINGLE: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    load: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16]
    )
    head = head0 + gl.arange(0, HEADS, layout=gl.SliceLayout(1, load))
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, load))
    at = Q + b.to(gl.int64) * Q_TOKEN + head[:, None] * Q_HEAD + column[None, :]
    q_left.store(gl.load(at))
    q_right.store(gl.load(at + HALF))
    column = gl.arange(0, ROPE, layout=gl.SliceLayout(0, load))
    q_rope.store(gl.load(Q_ROPE + b.to(gl.int64) * QR_TOKEN + head[:, None] * QR_HEAD + column[None, :]))
    fence_async_shared()
    zeros = gl.zeros([HEADS, KEYS], gl.float32, s_layout)
    s = _issue_scores(q_left, q_right, q_rope, left, right, rope, full, zeros, 0)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(free.index(STAGES), count=1)
    mbarrier.arrive(free.index(2 * STAGES), count=1)
    key = (last - 1) * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, s_layout))
    # Only the newest tile, which comes first, may hold positions that are not the request's; it holds one that is.
    s = gl.where((key < n)[None, :], s, float("-inf"))
    m = gl.max(s, 1) * scale2
    p = gl.exp2(s * scale2 - m[:, None])
    l = gl.sum(p, 1)
    acc = gl.zeros([HEADS, HALF], gl.float32, acc_layout)
    weights.store(p.to(Q.dtype.element_ty))
    factors.store(l * 0.0)
    fence_async_shared()
    mbarrier.arrive(handed.index(0), count=1)
    for i in range(1, last - first):
        stage = i % STAGES
        before = (i - 1) % STAGES
        # The sum of the tile before goes first: its place is the next that is loaded.
        acc = warpgroup_mma(weights, left.index(before), acc, is_async=True)
        s = _issue_scores(q_left, q_right, q_rope, left, right, rope, full, zeros, i)
        acc = warpgroup_mma_wait(3, deps=[acc])
        mbarrier.arrive(free.index(before), count=1)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(free.index(STAGES + stage), count=1)
        mbarrier.arrive(free.index(2 * STAGES + stage), count=1)
        top = gl.maximum(m, gl.max(s, 1) * scale2)
        p = gl.exp2(s * scale2 - top[:, None])
        alpha = gl.exp2(m - top)
        l = l * alpha + gl.sum(p, 1)
        m = top
        mbarrier.wait(taken.index(0), (i - 1) & 1)
        weights.store(p.to(Q.dtype.element_ty))
        factors.store(alpha)
        fence_async_shared()
        mbarrier.arrive(handed.index(0), count=1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc_layout))[:, None]
    tiles = last - first
    acc = warpgroup_mma(weights, left.index((tiles - 1) % STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    # The other half is normalised by the same sums.
    mbarrier.wait(taken.index(0), (tiles - 1) & 1)
    factors.store(l)
    mbarrier.arrive(handed.index(0), count=1)
    l = gl.convert_layout(l, gl.SliceLayout(1, acc_layout))
    m = gl.convert_layout(m, gl.SliceLayout(1, acc_layout))
    _store(acc, l, m, OUT, PART, PART_LSE, v_scale, b, split, splits, head0, 0, HQ, SINGLE)
    if HAS_LSE and SINGLE:
        rows = head0 + gl.arange(0, HEADS, layout=gl.SliceLayout(1, acc_layout))
        gl.store(LSE + b.to(gl.int64) * HQ + rows, (m + gl.log2(l)) * 0.6931471805599453)


@gluon.jit
def _sum_right(
    OUT,
    PART,
    PART_LSE,
    right,
    weights,
    factors,
    full,
    free,
    handed,
    taken,
    v_scale,
    b,
    split,
    splits,
    head0,
    first,
    last,
    HQ: gl.constexpr,
    SINGLE: gl.constexpr,
):
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16]
    )
    row: gl.constexpr = gl.SliceLayout(1, acc_layout)
    acc = gl.zeros([HEADS, HALF], gl.float32, acc_layout)
    for i in range(last - first):
        stage = i % STAGES
        mbarrier.wait(full.index(STAGES + stage), (i // STAGES) & 1)
        mbarrier.wait(handed.index(0), i & 1)
        acc = acc * factors.load(row)[:, None]
        acc = warpgroup_mma(weights, right.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(taken.index(0), count=1)
        mbarrier.arrive(free.index(STAGES + stage), count=1)
    mbarrier.wait(handed.index(0), (last - first) & 1)
    l = factors.load(row)
    _store(acc, l, l, OUT, PART, PART_LSE, v_scale, b, split, splits, head0, HALF, HQ, SINGLE)


@gluon.jit(do_not_specialize=["splits"])
def mla_hopper_kernel(
    half_desc,
    rope_desc,
    Q,
    Q_ROPE,
    IDS,
    TABLE_ROWS,
    LENS,
    OUT,
    LSE,
    PART,
    PART_LSE,
    scale2,
    v_scale,
    splits,
    HQ: gl.constexpr,
    Q_TOKEN: gl.constexpr,
    Q_HEAD: gl.constexpr,
    QR_TOKEN: gl.constexpr,
    QR_HEAD: gl.constexpr,
    TABLE_ROW: gl.constexpr,
    SINGLE: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    """Grid (heads / 64, splits, requests): each request's tiles in equal shares, from the newest back."""
    head0 = gl.program_id(0) * HEADS
    split = gl.program_id(1)
    b = gl.program_id(2)
    n = gl.load(LENS + b).to(gl.int32)
    tiles = (n + KEYS - 1) // KEYS
    first = split * tiles // splits
    last = (split + 1) * tiles // splits
    rows: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if first >= last:
        # A share without keys: the merge reads its -inf, and nothing else of it.
        head = head0 + gl.arange(0, HEADS, layout=rows)
        if SINGLE:
            wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
            line = head0 + gl.arange(0, HEADS, layout=gl.SliceLayout(1, wide))
            column = gl.arange(0, 2 * HALF, layout=gl.SliceLayout(0, wide))
            nothing = gl.zeros([HEADS, 2 * HALF], OUT.dtype.element_ty, wide)
            gl.store(OUT + (b * HQ + line).to(gl.int64)[:, None] * (2 * HALF) + column[None, :], nothing)
            if HAS_LSE:
                gl.store(LSE + b.to(gl.int64) * HQ + head, gl.full([HEADS], float("-inf"), gl.float32, rows))
        else:
            place = ((b * splits + split) * HQ + head).to(gl.int64)
            gl.store(PART_LSE + place, gl.full([HEADS], float("-inf"), gl.float32, rows))
    else:
        table = IDS + gl.load(TABLE_ROWS + b) * TABLE_ROW
        dtype: gl.constexpr = Q.dtype.element_ty
        shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        line_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        q_left = gl.allocate_shared_memory(dtype, [HEADS, HALF], shared)
        q_right = gl.allocate_shared_memory(dtype, [HEADS, HALF], shared)
        q_rope = gl.allocate_shared_memory(dtype, [HEADS, ROPE], shared)
        left = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HALF], shared)
        right = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HALF], shared)
        rope = gl.allocate_shared_memory(dtype, [STAGES, KEYS, ROPE], shared)
        weights = gl.allocate_shared_memory(dtype, [HEADS, KEYS], shared)
        factors = gl.allocate_shared_memory(gl.float32, [HEADS], line_layout)
        flag: gl.constexpr = mbarrier.MBarrierLayout()
        # Left halves, right halves and rope parts, by stage.
        full = gl.allocate_shared_memory(gl.int64, [3 * STAGES, 1], flag)
        free = gl.allocate_shared_memory(gl.int64, [3 * STAGES, 1], flag)
        handed = gl.allocate_shared_memory(gl.int64, [1, 1], flag)
        taken = gl.allocate_shared_memory(gl.int64, [1, 1], flag)
        for i in gl.static_range(3 * STAGES):
            mbarrier.init(full.index(i), count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(free.index(i), count=1)
            # Both warpgroups read the right half: one scores it, one sums it.
            mbarrier.init(free.index(STAGES + i), count=2)
            mbarrier.init(free.index(2 * STAGES + i), count=1)
        mbarrier.init(handed.index(0), count=1)
        mbarrier.init(taken.index(0), count=1)
        fence_async_shared()
        gl.warp_specialize(
            [
                (
                    _score_and_sum_left,
                    (
                        Q,
                        Q_ROPE,
                        OUT,
                        LSE,
                        PART,
                        PART_LSE,
                        q_left,
                        q_right,
                        q_rope,
                        left,
                        right,
                        rope,
                        weights,
                        factors,
                        full,
                        free,
                        handed,
                        taken,
                        scale2,
                        v_scale,
                        b,
                        n,
                        split,
                        splits,
                        head0,
                        first,
                        last,
                        HQ,
                        Q_TOKEN,
                        Q_HEAD,
                        QR_TOKEN,
                        QR_HEAD,
                        SINGLE,
                        HAS_LSE,
                    ),
                ),
                (
                    _sum_right,
                    (
                        OUT,
                        PART,
                        PART_LSE,
                        right,
                        weights,
                        factors,
                        full,
                        free,
                        handed,
                        taken,
                        v_scale,
                        b,
                        split,
                        splits,
                        head0,
                        first,
                        last,
                        HQ,
                        SINGLE,
                    ),
                ),
                (_produce, (half_desc, rope_desc, left, right, rope, full, free, table, first, last)),
            ],
            [4, 4],
            [240, 24],
        )
