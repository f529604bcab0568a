"""Dense attention in float64 from the logical keys and values of each request: no pool, no table, no backend.

The pinned semantics: scores = q·k · scaling; the soft cap cap·tanh(s/cap); masks; sinks in the denominator only.
The LSE is a natural log over scaled, capped and masked scores, without sinks. ``Rules`` holds these; its other values
are the known faults that a wrong output is compared with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

CHUNK_CELLS = 1 << 25
"""Most score cells held at once: 256 MiB in float64."""


class Problem(NamedTuple):
    """One request of one layer, as the mathematics sees it. n queries, S keys; any device, float64."""

    q: Tensor
    """[n, Hq, D]."""
    k: Tensor
    """[S, Hk, D]: what a reader of the pool gets, dequantised."""
    v: Tensor
    """[S, Hk, Dv]."""
    q_pos: Tensor
    """[n] int64."""
    k_pos: Tensor
    """[S] int64."""
    tree: Tensor | None = None
    """[n, S] bool: which keys an explicit mask lets a query see."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What is visible, and how scores become weights."""

    scaling: float
    cap: float = 0.0
    cap_stage: Literal["scores", "after_mask", "before_scaling"] = "scores"
    window: int = -1
    """w: w+1 keys, the query's own included."""
    causal: Literal["bottom_right", "top_left", "strict", "none"] = "bottom_right"
    use_tree: Literal["mask", "ignored", "transposed"] = "mask"
    sinks: Literal["denominator", "ignored", "twice", "reapplied", "scaled", "shifted"] = "denominator"
    grouping: Literal["blocks", "interleaved"] = "blocks"
    k_factor: float = 1.0
    v_factor: float = 1.0
    keys: Literal["all", "but_newest", "but_oldest", "new_only", "cached_only"] = "all"
    counted: Literal["once", "new_twice", "prefix_twice"] = "once"
    value_of: Literal["v", "k"] = "v"
    lse: Literal["natural", "base2", "with_sinks", "unscaled"] = "natural"


class Answer(NamedTuple):
    """What attention is."""

    out: Tensor
    """[n, Hq, Dv] float64; zeros where nothing is visible."""
    lse: Tensor
    """[n, Hq] float64; −inf where nothing is visible."""


def visibility(problem: Problem, rules: Rules) -> Tensor:
    """Return which keys each query sees, [n, S] bool."""
    q_pos, k_pos = problem.q_pos[:, None], problem.k_pos[None, :]
    n, length = problem.q.shape[0], problem.k.shape[0]
    index = torch.arange(length, device=problem.k.device)[None, :]
    row = torch.arange(n, device=problem.k.device)[:, None]
    seen = torch.ones((n, length), dtype=torch.bool, device=problem.k.device)
    tree = problem.tree
    if tree is not None and rules.use_tree != "ignored":
        if rules.use_tree == "transposed":
            # Only the window of drafts is square; what is cached stays as it is.
            cached = length - n
            tree = torch.cat([tree[:, :cached], tree[:, cached:].T], dim=1)
        seen &= tree
    elif rules.causal == "top_left":
        seen &= index <= row
    elif rules.causal == "strict":
        seen &= index < length - n + row
    elif rules.causal == "bottom_right":
        seen &= index <= length - n + row
    if rules.window >= 0:
        seen &= k_pos >= q_pos - rules.window
        if rules.causal == "none":
            seen &= k_pos <= q_pos + rules.window
    if rules.keys == "but_newest":
        seen &= index < length - 1
    elif rules.keys == "but_oldest":
        seen &= index > 0
    elif rules.keys == "new_only":
        seen &= index >= length - n
    elif rules.keys == "cached_only":
        seen &= index < length - n
    return seen


def attend(problem: Problem, rules: Rules, sinks: Tensor | None = None) -> Answer:
    """Return attention of one request.

    Args:
        problem: Queries, keys and values.
        rules: The layer's semantics, or those of a fault.
        sinks: [Hq] logits, or None.
    """
    n, heads = problem.q.shape[:2]
    rows = max(1, CHUNK_CELLS // max(1, heads * problem.k.shape[0]))
    if n <= rows:
        return _attend(problem, visibility(problem, rules), rules, sinks)
    seen = visibility(problem, rules)
    parts = [
        _attend(problem._replace(q=problem.q[start : start + rows]), seen[start : start + rows], rules, sinks)
        for start in range(0, n, rows)
    ]
    return Answer(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


def _attend(problem: Problem, seen: Tensor, rules: Rules, sinks: Tensor | None) -> Answer:
    q = problem.q
    values = problem.k if rules.value_of == "k" else problem.v
    k, v = _expand(problem.k * rules.k_factor, q.shape[1], rules), _expand(values * rules.v_factor, q.shape[1], rules)
    scores = torch.einsum("nhd,shd->nhs", q, k)
    if rules.cap_stage == "before_scaling" and rules.cap:
        scores = rules.cap * torch.tanh(scores / rules.cap) * rules.scaling
    else:
        scores = scores * rules.scaling
    hidden = ~seen[:, None, :]
    if rules.cap and rules.cap_stage == "scores":
        scores = rules.cap * torch.tanh(scores / rules.cap)
    scores = scores.masked_fill(hidden, float("-inf"))
    if rules.cap and rules.cap_stage == "after_mask":
        scores = rules.cap * torch.tanh(scores / rules.cap)
    if rules.counted != "once":
        # A key that is counted twice weighs twice.
        cached = scores.shape[-1] - problem.q_pos.shape[0]
        scores[..., slice(cached, None) if rules.counted == "new_twice" else slice(0, cached)] += math.log(2.0)
    lse = torch.logsumexp(scores, dim=-1)
    empty = torch.isneginf(lse)
    weights = torch.exp(scores - lse.masked_fill(empty, 0.0)[..., None])
    out = torch.einsum("nhs,shd->nhd", weights, v.nan_to_num() if bool(hidden.any()) else v)
    return _close(out, lse, rules, sinks)


def _close(out: Tensor, lse: Tensor, rules: Rules, sinks: Tensor | None) -> Answer:
    """Let sinks join the denominator, and write the LSE."""
    if sinks is not None and rules.sinks != "ignored":
        logits = sinks.roll(1) if rules.sinks == "shifted" else sinks
        if rules.sinks == "scaled":
            logits = logits * rules.scaling
        if rules.sinks == "twice":
            logits = logits + math.log(2.0)
        out = out * torch.sigmoid(lse - logits)[..., None]
        if rules.sinks == "reapplied":
            out = out * torch.sigmoid(lse - logits)[..., None]
        if rules.lse == "with_sinks":
            lse = torch.logaddexp(lse, logits.expand_as(lse))
    if rules.lse == "base2":
        lse = lse / math.log(2.0)
    elif rules.lse == "unscaled":
        lse = lse / rules.scaling
    return Answer(out, lse)


def _expand(x: Tensor, heads: int, rules: Rules) -> Tensor:
    """Give each query head its KV head, [S, Hq, …]."""
    group = heads // x.shape[1]
    if group == 1:
        return x
    if rules.grouping == "interleaved":
        return x.repeat(1, group, 1)
    return x.repeat_interleave(group, dim=1)
