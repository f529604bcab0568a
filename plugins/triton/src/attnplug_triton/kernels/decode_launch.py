"""Launching of decode: one attention kernel, and a merge where keys were shared out."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .args import LOG2E, Keys, Rules, Widths, next_power
from .config import FIXED_SPLIT_TOKENS, STREAM_EXTRA, Schedule, TileConfig
from .decode import decode_split_kernel, decode_stream_kernel
from .merge import merge_kernel
from .version import INTERPRETED

_SCHEDULES = {"equal": 0, "fixed": 1, "stream": 2}


class Partials(NamedTuple):
    """Scratch of one launch; overwritten by the next."""

    attn_logits: Tensor
    """[partials · W · Hq · Dv] float32 or longer, device: normalised shares."""
    attn_lse: Tensor
    """[partials · W · Hq] float32 or longer, device: their LSE, natural."""


def precision_of(dtype: torch.dtype) -> str:
    """Return the precision of products: float32 is computed as such, not in tf32; see ``tile.dot`` for 'widen'."""
    if INTERPRETED and dtype == torch.bfloat16:
        return "widen"
    return "ieee" if dtype == torch.float32 else "tf32"


def decode_attention(
    q: Tensor,
    keys: Keys,
    rules: Rules,
    widths: Widths,
    *,
    query_len: int,
    schedule: Schedule,
    tile: TileConfig,
    partials: Partials | None,
    out: Tensor,
    lse: Tensor | None = None,
    q_rope: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Attend the same number of queries of each request to a pool. Nothing is allocated, nothing synchronises.

    Args:
        q: [B · W, Hq, D], columns contiguous; MLA: the latent part, [B · W, Hq, C].
        keys: Where keys are.
        rules: What attention over them means.
        widths: Head widths.
        query_len: W, queries a request; the last is at its last position.
        schedule: How keys are shared out.
        tile: How the kernel is compiled.
        partials: Scratch for what is shared out; None for schedule 'single'.
        out: [B · W, Hq, Dv] contiguous, written.
        lse: [B · W, Hq] float32 contiguous, written where given: natural log, without sinks.
        q_rope: MLA: the rotated part, [B · W, Hq, R].
        pdl: Let the merge's launch overlap the attention kernel (compute capability 9.0 and later).
    """
    tokens, heads = q.shape[0], q.shape[1]
    if tokens == 0:
        return
    kv_heads, batch = keys.k.shape[1], tokens // query_len
    group = heads // kv_heads
    blocks = triton.cdiv(query_len * group, tile.rows)
    k, v, table = keys.k, keys.v, keys.table
    tree = rules.tree
    rope = q if q_rope is None else q_rope
    shared = schedule.kind != "single"
    part = partials if partials is not None else Partials(out, out)
    lengths, cells, start, positions = keys.lens, keys.lens, keys.lens, keys.lens
    if tree is not None:
        cells, start, positions = tree.cells.view(torch.uint8), tree.start, tree.positions
    sinks = rules.sinks if rules.sinks is not None else out
    common: dict[str, Any] = dict(
        HQ=heads,
        G=group,
        W=query_len,
        D=widths.d,
        DV=widths.dv,
        ROPE=widths.rope,
        BM=tile.rows,
        BN=tile.keys,
        BD=next_power(widths.d),
        BDV=next_power(widths.dv),
        Q_TOKEN=q.stride(0),
        Q_HEAD=q.stride(1),
        QR_TOKEN=rope.stride(0),
        QR_HEAD=rope.stride(1),
        K_SLOT=k.stride(0),
        K_HEAD=k.stride(1),
        V_SLOT=v.stride(0),
        V_HEAD=v.stride(1),
        TABLE_ROW=table.ids.stride(0),
        ONE_PAGE=table.page % tile.keys == 0,
        ENTRY=table.entry,
        CAUSAL=rules.causal,
        WINDOW=rules.window,
        CAP=rules.cap > 0.0,
        TREE=0 if tree is None else 1 if tree.full else 2,
        LATENT=widths.latent,
        HAS_SINKS=rules.sinks is not None,
        HAS_LSE=lse is not None,
        PDL=pdl and shared,
        HALF=k.dtype.itemsize == 1 and q.dtype == torch.bfloat16,
        PRECISION=precision_of(q.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    runtime = (
        q,
        rope,
        k,
        v,
        table.ids,
        table.rows,
        lengths,
        cells,
        start,
        positions,
        sinks,
        out,
        lse if lse is not None else out,
        part.attn_logits,
        part.attn_lse,
        rules.scaling * rules.k_scale * LOG2E,
        rules.cap * LOG2E,
        rules.k_scale if widths.latent else rules.v_scale,
        batch,
        keys.extra_len,
        schedule.splits,
    )
    tiles_a_split = max(FIXED_SPLIT_TOKENS // tile.keys, 1)
    width = next_power(batch, 1)
    if schedule.kind == "stream":
        grid: tuple[int, ...] = (kv_heads * blocks, schedule.splits)
        decode_stream_kernel[grid](*runtime, **common, EXTRA=STREAM_EXTRA, BB=width)
    else:
        grid = (kv_heads * blocks, schedule.splits, batch)
        decode_split_kernel[grid](*runtime, tiles_a_split, **common, SINGLE=not shared, FIXED=schedule.kind == "fixed")
    if not shared:
        return
    merge_partials(
        part, keys, rules, schedule, tile.keys, widths.dv, query_len=query_len, out=out, lse=lse, pdl=pdl, early=True
    )


def merge_partials(
    part: Partials,
    keys: Keys,
    rules: Rules,
    schedule: Schedule,
    tile_keys: int,
    width: int,
    *,
    query_len: int,
    out: Tensor,
    lse: Tensor | None,
    pdl: bool,
    early: bool = False,
) -> None:
    """Merge what an attention kernel wrote as shares into its answer.

    Args:
        part: The shares.
        keys: Whose lengths say how many shares a request has.
        rules: Window and sinks.
        schedule: How keys were shared out.
        tile_keys: Keys a tile of the kernel.
        width: Dv.
        query_len: W.
        out: [B · W, Hq, Dv] contiguous, written.
        lse: [B · W, Hq] float32, written where given.
        pdl: Whether the launch may overlap the kernel before it.
        early: Whether that kernel lets its dependents start early.
    """
    tokens, heads = out.shape[0], out.shape[1]
    overlap = pdl and early and not INTERPRETED
    launch = {"launch_pdl": True} if overlap else {}
    merge_kernel[(heads, tokens)](
        part.attn_logits,
        part.attn_lse,
        keys.lens,
        rules.sinks if rules.sinks is not None else out,
        out,
        lse if lse is not None else out,
        tokens // query_len,
        keys.extra_len,
        schedule.splits,
        max(FIXED_SPLIT_TOKENS // tile_keys, 1),
        HQ=heads,
        W=query_len,
        DV=width,
        BDV=next_power(width),
        BN=tile_keys,
        WINDOW=rules.window,
        EXTRA=STREAM_EXTRA,
        BB=next_power(tokens // query_len, 1),
        BS=min(next_power(schedule.splits, 2), 32 if width > 256 else 64),
        SCHEDULE=_SCHEDULES[schedule.kind],
        HAS_SINKS=rules.sinks is not None,
        HAS_LSE=lse is not None,
        PDL=overlap,
        num_warps=4,
        **launch,
    )
