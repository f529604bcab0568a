"""Attention over dense tiles in two ways: PyTorch's fused kernel where it suffices, written-out math elsewhere.

Shapes here: N requests of one shape, Hk KV heads, M = t·G folded query rows (a KV head's group lies beside it), n keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnplug.merge import apply_sink, merge_state

KEY_BLOCK = 1 << 14
"""Keys that are upcast at once where the softmax is written out: a float32 copy of a long request is twice its keys."""
LONG_KEYS = 1 << 16
"""From here on a float32 call writes the softmax out: over 131072 keys the fused CPU kernel's one running sum is off by
up to 1.4e-7, blocks merged by LSE by 0.4e-7 (normal values, largest output 0.01)."""


@dataclass(frozen=True, slots=True)
class Scores:
    """From q·k to weights, in the contract's order: scale, cap, mask, then sinks in the denominator."""

    scale: float
    """Factor on q·k, the keys' storage scale included."""
    cap: float = 0.0
    """Soft cap, ``cap · tanh(s / cap)``; 0: none."""
    sinks: Tensor | None = None
    """[Hk, G], a logit a query head; None: none."""
    v_scale: float = 1.0
    """Factor on the values."""


class TileState(NamedTuple):
    """One tile's result."""

    out: Tensor
    """[N, Hk, M, Dv], normalised; zeros where no key was visible."""
    lse: Tensor | None
    """[N, Hk, M] float32 or float64, natural log, without sinks; −inf where no key was visible."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that scores and sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend_fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores, *, may_see_nothing: bool = False
) -> Tensor:
    """Attend by ``scaled_dot_product_attention``: no cap, no sinks, no LSE.

    Args:
        q: [N, Hk, M, D].
        k: [N, Hk, n, D], any strides with a dense last dimension.
        v: [N, Hk, n, Dv] likewise.
        mask: [N or 1, 1, M, n] bool, True where visible; None: all.
        scores: Its scale and v_scale are used.
        may_see_nothing: Whether the mask may leave a query without a key, whose row is then made zeros.

    Returns:
        [N, Hk, M, Dv] in q's dtype.
    """
    d, dv, m = q.shape[-1], v.shape[-1], q.shape[2]
    # The fused kernels want one width; zeros add nothing to q·k, and a padded value column is cut off again.
    if d < dv:
        q, k = F.pad(q, (0, dv - d)), F.pad(k, (0, dv - d))
    elif dv < d:
        v = F.pad(v, (0, d - dv))
    if m == 1:
        # One row would go to a matrix-vector kernel whose sums depend on how its buffers happen to be aligned.
        q = q.expand(-1, -1, 2, -1)
        mask = None if mask is None else mask.expand(-1, -1, 2, -1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scores.scale)[:, :, :m, :dv]
    if may_see_nothing and mask is not None:
        out = out.masked_fill(~mask[:, :, :m].any(-1, keepdim=True), 0.0)
    return out if scores.v_scale == 1.0 else out * scores.v_scale


def attend_explicit(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores, *, return_lse: bool
) -> TileState:
    """Attend by matrix products and a softmax written out: cap, sinks, LSE, and queries that see nothing.

    Computed in float32, in float64 for float64 inputs, a block of keys at a time. Arguments as ``attend_fused``; with
    ``return_lse`` sinks are left out of the output too, so that states merge.
    """
    acc, n = accumulator(q.dtype), k.shape[2]
    rows = q.to(acc)
    state: tuple[Tensor, Tensor] | None = None
    for first in range(0, n, KEY_BLOCK):
        part = slice(first, first + KEY_BLOCK)
        cells = None if mask is None else mask[..., part]
        block = _attend_block(rows, k[:, :, part].to(acc), v[:, :, part].to(acc), cells, scores)
        state = block if state is None else merge_state(*state, *block)
    assert state is not None  # a tile has keys
    out, lse = state
    if scores.sinks is not None and not return_lse:
        # Row i·G + g of a KV head is query i of the group's head g.
        sinks = scores.sinks.to(acc).repeat(1, q.shape[2] // scores.sinks.shape[1])
        out = apply_sink(out, lse, sinks)
    if scores.v_scale != 1.0:
        out = out * scores.v_scale
    return TileState(out.to(q.dtype), lse if return_lse else None)


def _attend_block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores) -> tuple[Tensor, Tensor]:
    """Return out [N, Hk, M, Dv] and lse [N, Hk, M] over one block of keys, without sinks; all in one dtype."""
    n_req, heads, m, _ = q.shape
    # One row would go to a matrix-vector kernel, whose sums depend on how its buffers happen to be aligned.
    rows = max(m, 2)
    s = torch.bmm(q.expand(-1, -1, rows, -1).flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
    s = s.view(n_req, heads, rows, -1).mul_(scores.scale)
    if scores.cap:
        s = s.div_(scores.cap).tanh_().mul_(scores.cap)
    if mask is not None:
        s = s.masked_fill_(~mask, float("-inf"))
    top = s.amax(-1, keepdim=True)
    top = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
    p = s.sub_(top).exp_()
    total = p.sum(-1, keepdim=True)
    out = torch.bmm(p.flatten(0, 1), v.flatten(0, 1)).view(n_req, heads, rows, -1)
    out = out / torch.where(total == 0, torch.ones_like(total), total)
    lse = (top + torch.log(total)).squeeze(-1)
    return out[:, :, :m], lse[:, :, :m]
