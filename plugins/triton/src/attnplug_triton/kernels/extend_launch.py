"""Launching of extend: one kernel for any mixture of query lengths."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .args import LOG2E, Keys, Rules, Table, Widths, next_power
from .config import TileConfig
from .decode_launch import precision_of
from .extend import extend_kernel


class Queries(NamedTuple):
    """How query rows belong to requests."""

    batch_size: int
    lens: Tensor | None
    """[B] int32, device; None: the same for each."""
    uniform: int
    """Queries of each request, where lens is None."""
    tiles_bound: int
    """At least the tiles of rows of all requests; what is past them ends at once."""


class NewRows(NamedTuple):
    """Keys and values of the call itself."""

    k: Tensor
    """[rows, Hk, D], columns contiguous."""
    v: Tensor
    """[rows, Hk, Dv], columns contiguous."""
    indptr: Tensor | None = None
    """[B + 1] int64, device: request b's rows; None: those of its queries."""


def row_tiles(query_lens: tuple[int, ...], group: int, rows: int) -> int:
    """Return how many tiles of M the requests take, from the lengths on the host."""
    return sum(-(-n * group // rows) for n in query_lens)


def extend_attention(
    q: Tensor,
    queries: Queries,
    rules: Rules,
    widths: Widths,
    *,
    keys: Keys | None,
    new: NewRows | None = None,
    tile: TileConfig,
    out: Tensor,
    lse: Tensor | None = None,
    q_rope: Tensor | None = None,
    maxnreg: int | None = None,
) -> None:
    """Attend query rows to a pool, to rows of the call, or to the pool's prefix and then the rows; allocates nothing.

    Args:
        q: [T, Hq, D], columns contiguous, request after request; MLA: the latent part.
        queries: How rows belong to requests.
        rules: What attention means; rows of the call carry no scales.
        widths: Head widths.
        keys: Where cached keys are; with ``new`` their lengths count the new rows too, which are the last.
        new: This step's rows, where they are not read from the pool.
        tile: How the kernel is compiled.
        out: [T, Hq, Dv] contiguous, written.
        lse: [T, Hq] float32 contiguous, written where given: natural log, without sinks.
        q_rope: MLA: the rotated part, [T, Hq, R].
        maxnreg: Most registers a thread; None leaves it to the compiler.
    """
    if q.shape[0] == 0 or queries.batch_size == 0 or queries.tiles_bound == 0:
        return
    heads = q.shape[1]
    rope = q if q_rope is None else q_rope
    tree = rules.tree
    none = queries.lens if queries.lens is not None else out
    if keys is None:
        assert new is not None  # a launch reads keys from somewhere
        keys = Keys(new.k, new.v, Table(out, out), none)
        source = 2
    else:
        source = 0 if new is None else 1
    k, v, table = keys.k, keys.v, keys.table
    k_new, v_new = (k, v) if new is None else (new.k, new.v)
    indptr = None if new is None else new.indptr
    cells, start, positions = out, out, out
    if tree is not None:
        cells, start, positions = tree.cells.view(torch.uint8), tree.start, tree.positions
    kv_heads = k.shape[1]
    options: dict[str, Any] = {} if maxnreg is None else {"maxnreg": maxnreg}
    extend_kernel[(queries.tiles_bound * kv_heads,)](
        q,
        rope,
        k,
        v,
        k_new,
        v_new,
        table.ids,
        table.rows,
        keys.lens,
        none,
        none if indptr is None else indptr,
        cells,
        start,
        positions,
        rules.sinks if rules.sinks is not None else out,
        out,
        lse if lse is not None else out,
        rules.scaling * rules.k_scale * LOG2E,
        rules.cap * LOG2E,
        rules.scaling * LOG2E,
        (rules.k_scale if widths.latent else rules.v_scale) if source != 2 else 1.0,
        queries.batch_size,
        queries.uniform,
        keys.extra_len,
        HQ=heads,
        HK=kv_heads,
        D=widths.d,
        DV=widths.dv,
        ROPE=widths.rope,
        BM=tile.rows,
        BN=tile.keys,
        BD=next_power(widths.d),
        BDV=next_power(widths.dv),
        BB=next_power(queries.batch_size, 1),
        Q_TOKEN=q.stride(0),
        Q_HEAD=q.stride(1),
        QR_TOKEN=rope.stride(0),
        QR_HEAD=rope.stride(1),
        K_SLOT=k.stride(0),
        K_HEAD=k.stride(1),
        V_SLOT=v.stride(0),
        V_HEAD=v.stride(1),
        KN_TOKEN=k_new.stride(0),
        KN_HEAD=k_new.stride(1),
        VN_TOKEN=v_new.stride(0),
        VN_HEAD=v_new.stride(1),
        TABLE_ROW=table.ids.stride(0),
        ONE_PAGE=table.page % tile.keys == 0,
        ENTRY=table.entry,
        SOURCE=source,
        UNIFORM=queries.lens is None,
        BY_INDPTR=indptr is not None,
        CAUSAL=rules.causal,
        WINDOW=rules.window,
        CAP=rules.cap > 0.0,
        TREE=0 if tree is None else 1 if tree.full else 2,
        LATENT=widths.latent,
        HAS_SINKS=rules.sinks is not None,
        HAS_LSE=lse is not None,
        # Rows of the call may hold what float16 does not.
        HALF=source == 0 and k.dtype.itemsize == 1 and q.dtype == torch.bfloat16,
        PRECISION=precision_of(q.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **options,
    )
