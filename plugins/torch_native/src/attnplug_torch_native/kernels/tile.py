"""One tile: fold each KV head's query group into the rows, cut long query blocks, attend, unfold."""

from __future__ import annotations

import torch
from torch import Tensor

from .mask import Visibility
from .softmax import LONG_KEYS, Scores, TileState, accumulator, attend_explicit, attend_fused

ALIGNMENT = 64
"""Bytes: matrix kernels choose how to sum by whether their operands start on a cache line."""


def attend_apart(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    mask: Tensor | None,
    scores: Scores,
    *,
    explicit: bool,
    may_see_nothing: bool,
    return_lse: bool,
    max_cells: int,
) -> TileState:
    """Attend a tile as ``attend_tile`` does, but request by request: a result is bitwise that of the request alone.

    A batched call is shared out among threads by its size, and with that its sums change in their last bit.
    """
    states = []
    for i in range(q.shape[0]):
        one = slice(i, i + 1)
        cells = None if mask is None else mask[one] if mask.shape[0] > 1 else mask
        states.append(
            attend_tile(
                _aligned(q[one]),
                _aligned(k[one]),
                _aligned(v[one]),
                visibility.part(i),
                cells,
                scores,
                explicit=explicit,
                may_see_nothing=may_see_nothing,
                return_lse=return_lse,
                max_cells=max_cells,
            )
        )
    lses = [state.lse for state in states if state.lse is not None]
    return TileState(torch.cat([state.out for state in states]), torch.cat(lses) if lses else None)


def attend_tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    mask: Tensor | None,
    scores: Scores,
    *,
    explicit: bool,
    may_see_nothing: bool,
    return_lse: bool,
    max_cells: int,
) -> TileState:
    """Attend the requests of a tile.

    Memory is bounded: long queries are cut into blocks of at most ``max_cells`` scores or mask cells, and a block
    reads only the columns that some query of it may see. How they are cut follows from t and n alone.

    Args:
        q: [N, t, Hq, D].
        k: [N, n, Hk, D], any strides with a dense last dimension.
        v: [N, n, Hk, Dv] likewise.
        visibility: Who sees what.
        mask: [N or 1, t, n] bool in its place, or None.
        scores: Scale, cap, sinks.
        explicit: Write the softmax out instead of calling the fused kernel.
        may_see_nothing: Whether a query may be left without a key.
        return_lse: Give the LSE, and leave sinks out.
        max_cells: Most scores, or mask cells, of one request in one call.

    Returns:
        out [N, t, Hq, Dv] in q's dtype, and lse [N, t, Hq] where asked for.
    """
    n_req, t, hq, _ = q.shape
    n, hk, dv = k.shape[1], k.shape[2], v.shape[3]
    group = hq // hk
    explicit = explicit or (q.dtype == torch.float32 and n >= LONG_KEYS)
    folded = q.view(n_req, t, hk, group, -1).permute(0, 2, 1, 3, 4)  # [N, Hk, t, G, D]
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    # Written out, the scores of all heads exist at once; the fused kernel needs no more than its mask.
    cells_a_query = n * (hq if explicit else group)
    step = max(1, min(t, max_cells // max(1, cells_a_query)))
    outs, lses = [], []
    for lo in range(0, t, step):
        hi = min(t, lo + step)
        first, stop = (0, n) if mask is not None else visibility.columns(lo, hi, n)
        cells = visibility.mask((lo, hi), (first, stop), q.device) if mask is None else mask[:, lo:hi]
        rows = folded[:, :, lo:hi].flatten(2, 3)
        if cells is not None:
            cells = cells[:, None, :, None].expand(-1, 1, -1, group, -1).flatten(2, 3)
        part_k, part_v = keys[:, :, first:stop], values[:, :, first:stop]
        if explicit:
            out, lse = attend_explicit(rows, part_k, part_v, cells, scores, return_lse=return_lse)
        else:
            out, lse = attend_fused(rows, part_k, part_v, cells, scores, may_see_nothing=may_see_nothing), None
        outs.append(out.reshape(n_req, hk, hi - lo, group, dv).permute(0, 2, 1, 3, 4).reshape(n_req, hi - lo, hq, dv))
        if lse is not None:
            lses.append(lse.reshape(n_req, hk, hi - lo, group).permute(0, 2, 1, 3).reshape(n_req, hi - lo, hq))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
    if not return_lse:
        return TileState(out, None)
    acc = accumulator(q.dtype)
    return TileState(out, (lses[0] if len(lses) == 1 else torch.cat(lses, 1)).to(acc))


def _aligned(x: Tensor) -> Tensor:
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()
