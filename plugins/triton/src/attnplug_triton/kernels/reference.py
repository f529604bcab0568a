"""What the kernels compute, said plainly: one request, dense, in float64. For reading and for tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float,
    cap: float = 0.0,
    window: int = -1,
    causal: bool = True,
    sinks: Tensor | None = None,
    tree: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend a request's queries, the last n of its S positions, to its keys.

    Args:
        q: [n, Hq, D].
        k: [S, Hk, D].
        v: [S, Hk, Dv].
        scaling: Factor on q·k.
        cap: Soft cap; 0 for none.
        window: -1 for none; w keeps keys at distance w or less.
        causal: Whether position bounds the keys, bottom-right.
        sinks: [Hq] logits that join the denominator only.
        tree: [n, S] bool, which keys each query sees; replaces ``causal``.
        positions: [S] places in the sequence, which siblings in a tree share; by default 0 … S - 1.

    Returns:
        (out [n, Hq, Dv], lse [n, Hq] natural and without sinks), float64; zeros and -inf where nothing is visible.
    """
    n, length, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("nhd,shd->hns", q, k) * scaling
    if cap:
        scores = cap * torch.tanh(scores / cap)
    order = torch.arange(length, device=q.device)
    key_at = order if positions is None else positions
    query_at = key_at[length - n :, None]
    seen = torch.ones(n, length, dtype=torch.bool, device=q.device) if tree is None else tree.clone()
    if tree is None and causal:
        seen &= order[None, :] <= order[length - n :, None]
    if window >= 0:
        seen &= query_at - key_at[None, :] <= window
        if tree is None and not causal:
            seen &= key_at[None, :] - query_at <= window
    scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.double()[:, None])
    weights = torch.exp(scores - total.masked_fill(torch.isneginf(total), 0.0)[..., None])
    return torch.einsum("hns,shd->nhd", weights, v), lse.T
