"""Merging of attention states by their log-sum-exp: exact, for any number of heads, with −inf on either side.

The merge is that of online softmax (Milakov and Gimelshein, arXiv 1805.02867), as FlashInfer names it
(arXiv 2501.01005, section 2.2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class AttentionState(NamedTuple):
    """A normalised output with its natural-log LSE."""

    out: Tensor
    """[T, Hq, Dv], the model's dtype."""
    lse: Tensor
    """[T, Hq] float32; −inf where no key was visible."""


def merge_state(o1: Tensor, s1: Tensor, o2: Tensor, s2: Tensor) -> AttentionState:
    """Merge two states over disjoint keys into the state over both.

    The result equals attention over the union of the keys. Computed in float32, or in float64 where an input is. A row
    whose LSE is −inf on both sides gives zeros and −inf; a −inf side's output is not read, so it may hold NaN.

    Args:
        o1: Normalised output of the first part, [T, Hq, Dv].
        s1: Its LSE, natural log, [T, Hq].
        o2: Normalised output of the second part, [T, Hq, Dv].
        s2: Its LSE, natural log, [T, Hq].

    Returns:
        The merged state; ``out`` in o1's dtype, ``lse`` in the LSEs' dtype.
    """
    acc = torch.float64 if torch.float64 in (o1.dtype, s1.dtype, o2.dtype, s2.dtype) else torch.float32
    a, b = s1.to(acc), s2.to(acc)
    top = torch.maximum(a, b)
    shift = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
    w1, w2 = torch.exp(a - shift), torch.exp(b - shift)
    total = w1 + w2
    # A side without keys may carry NaN in its output: 0 * NaN is NaN, so it is replaced, not weighted.
    x1 = torch.where((w1 == 0).unsqueeze(-1), torch.zeros((), dtype=acc, device=o1.device), o1.to(acc))
    x2 = torch.where((w2 == 0).unsqueeze(-1), torch.zeros((), dtype=acc, device=o2.device), o2.to(acc))
    safe = torch.where(total == 0, torch.ones_like(total), total)
    out = (x1 * (w1 / safe).unsqueeze(-1) + x2 * (w2 / safe).unsqueeze(-1)).to(o1.dtype)
    return AttentionState(out, (torch.log(total) + shift).to(s1.dtype))


def apply_sink(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Close a state by attention sinks, once, after every merge.

    A sink joins the softmax's denominator only: ``out · exp(lse) / (exp(lse) + exp(sink))``.

    Args:
        out: Normalised output without sinks, [T, Hq, Dv].
        lse: Its LSE, natural log, [T, Hq].
        sinks: A logit a head, [Hq].

    Returns:
        The output with sinks, [T, Hq, Dv], out's dtype; zeros where no key was visible.
    """
    acc = torch.float64 if out.dtype == torch.float64 else torch.float32
    share = torch.sigmoid(lse.to(acc) - sinks.to(acc))
    return (out.to(acc) * share.unsqueeze(-1)).to(out.dtype)
