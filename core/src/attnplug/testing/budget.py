"""How far a right answer may be from the truth: measured on the case itself, by an independent computation.

Nothing here is a tolerance set by hand. The same case is computed in the model's dtype, with operands, capped scores,
weights and result rounded to it and products accumulated in float32, as tensor cores do; what that loses against
float64, row by row, is the unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .oracle import Answer, Problem, Rules, visibility

FACTOR = 6.0
"""A kernel's order of summation is not ours: two right computations differ by the sum of their errors, rows by luck.
Over axis A on a CPU, torch_native comes to 0.45 of the budget in float32, and to 0.17 in the half types."""
QUANTILE_ROWS = 1 << 20
"""Rows that the typical error is taken from: torch.quantile takes no more than 16 M values."""
BLOCK = 32
"""Keys a block of the low-precision computation: it rescales as streaming kernels do."""


class LowPrecision(NamedTuple):
    """What a low-precision computation gives."""

    out: Tensor
    """[n, Hq, Dv] float64."""
    lse: Tensor
    """[n, Hq] float64."""
    summed: Tensor
    """[n, Hq] float64: the largest Σ p·(1 + |s|)·|v| of a row: the sizes at which sums and scores are rounded."""


class Allowed(NamedTuple):
    """Largest allowed distance from the truth, by row and head; finite."""

    out: Tensor
    """[T, Hq] float64: of the largest element of a row."""
    lse: Tensor
    """[T, Hq] float64."""


def allowed_error(
    problems: Sequence[Problem], rules: Rules, sinks: Tensor | None, true: Answer, dtype: torch.dtype
) -> Allowed:
    """Return the budget of a step.

    A row's allowance is ``FACTOR`` times the larger of its own low-precision error and the error that is typical of the
    case at the row's magnitude, plus one rounding of its largest element: some rows are exact by luck. Values of many
    keys cancel, so that a row is far smaller than what was summed: two roundings at that size are allowed too.

    Args:
        problems: The requests.
        rules: The true semantics.
        sinks: [Hq] or None.
        true: The oracle's answer, all rows.
        dtype: The model's.
    """
    parts = [low_precision(problem, rules, sinks, dtype) for problem in problems]
    out, lse = torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts])
    summed = torch.cat([part.summed for part in parts])
    single = torch.finfo(dtype if dtype.itemsize > 4 else torch.float32).eps
    eps = torch.finfo(dtype).eps
    size = true.out.abs().amax(dim=-1)
    error = (out - true.out).abs().amax(dim=-1)
    typical = _typical((error / size)[size > 0])
    allowed = FACTOR * torch.maximum(error, typical * size) + eps * size + 2 * single * summed
    seen = torch.isfinite(true.lse)
    lse_error = (lse - true.lse).abs().masked_fill(~seen, 0.0)
    # An LSE leaves in float32 whatever the model's dtype; its scores come from products in the model's.
    lse_size = true.lse.abs().masked_fill(~seen, 0.0) + 1.0
    lse_typical = _typical(lse_error[seen])
    lse_allowed = FACTOR * torch.maximum(lse_error, lse_typical) + 2 * torch.finfo(torch.float32).eps * lse_size
    assert bool(torch.isfinite(allowed).all() and torch.isfinite(lse_allowed).all()), "a budget is finite"
    return Allowed(allowed, lse_allowed)


def low_precision(problem: Problem, rules: Rules, sinks: Tensor | None, dtype: torch.dtype) -> LowPrecision:
    """Return attention computed in ``dtype``, block by block, with streaming softmax; as float64."""
    n, heads, length = problem.q.shape[0], problem.q.shape[1], problem.k.shape[0]
    wide = torch.float32 if dtype.itemsize < 4 else dtype

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(wide)

    q = rounded(problem.q)
    seen = visibility(problem, rules)
    group = heads // problem.k.shape[1]
    top = torch.full((n, heads), float("-inf"), dtype=wide, device=q.device)
    total = torch.zeros((n, heads), dtype=wide, device=q.device)
    acc = torch.zeros((n, heads, problem.v.shape[-1]), dtype=wide, device=q.device)
    summed = torch.zeros_like(acc)
    # Long requests go in larger blocks: the loop is Python's, and errors grow with the number of rescalings.
    block = max(BLOCK, length // 1024)
    for start in range(0, length, block):
        keys = slice(start, start + block)
        k = rounded(problem.k[keys]).repeat_interleave(group, dim=1)
        v = rounded(problem.v[keys]).repeat_interleave(group, dim=1)
        scores = torch.einsum("nhd,shd->nhs", q, k) * rules.scaling
        if rules.cap:
            scores = rounded(rules.cap * torch.tanh(scores / rules.cap))
        # A score is rounded at its own size, and its weight is off by as much, relatively.
        rounding = 1.0 + scores.abs()
        scores = scores.masked_fill(~seen[:, None, keys], float("-inf"))
        new_top = torch.maximum(top, scores.amax(dim=-1))
        shift = new_top.masked_fill(torch.isneginf(new_top), 0.0)
        weights, keep = torch.exp(scores - shift[..., None]), torch.exp(top - shift)
        total = total * keep + weights.sum(dim=-1)
        acc = acc * keep[..., None] + torch.einsum("nhs,shd->nhd", rounded(weights), v)
        summed = summed * keep[..., None] + torch.einsum("nhs,shd->nhd", weights * rounding, v.abs())
        top = new_top
    lse = torch.log(total) + top.masked_fill(torch.isneginf(top), 0.0)
    if sinks is not None and rules.sinks != "ignored":
        total = total + torch.exp(sinks.to(wide) - top.masked_fill(torch.isneginf(top), 0.0))
    total = total.masked_fill(total == 0, 1.0)[..., None]
    return LowPrecision(rounded(acc / total).double(), lse.double(), (summed / total).amax(dim=-1).double())


def _typical(values: Tensor) -> Tensor:
    return torch.quantile(values.flatten()[:QUANTILE_ROWS], 0.9) if values.numel() else values.new_zeros(())
