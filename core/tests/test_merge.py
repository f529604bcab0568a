"""Merged states equal attention over the union of their keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnplug.merge import apply_sink, merge_state

INF = float("inf")


def attend(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse == -INF, torch.zeros_like(lse), lse).unsqueeze(-1))
    return torch.einsum("ths,shd->thd", weights, values), lse


@pytest.mark.parametrize("heads", [1, 5, 1100])
def test_two_parts_merge_into_the_whole(heads: int) -> None:
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(3, heads, 9, generator=g, dtype=torch.float64) * 4
    values = torch.randn(9, heads, 6, generator=g, dtype=torch.float64)
    whole, lse = attend(scores, values)
    merged = merge_state(*attend(scores[..., :4], values[:4]), *attend(scores[..., 4:], values[4:]))
    torch.testing.assert_close(merged.out, whole)
    torch.testing.assert_close(merged.lse, lse)


def test_a_side_without_keys_changes_nothing_even_where_its_output_is_nan() -> None:
    out, lse = torch.randn(2, 3, 4), torch.randn(2, 3)
    empty, none = torch.full((2, 3, 4), float("nan")), torch.full((2, 3), -INF)
    for merged in (merge_state(out, lse, empty, none), merge_state(empty, none, out, lse)):
        torch.testing.assert_close(merged.out, out)
        torch.testing.assert_close(merged.lse, lse)


def test_no_keys_on_both_sides_gives_zeros_and_minus_infinity() -> None:
    empty, none = torch.full((1, 2, 4), float("nan")), torch.full((1, 2), -INF)
    merged = merge_state(empty, none, empty, none)
    assert bool((merged.out == 0).all())
    assert bool((merged.lse == -INF).all())


def test_large_scores_do_not_overflow() -> None:
    o, s = torch.ones(1, 1, 1), torch.full((1, 1), 3e4)
    merged = merge_state(o, s, 3 * o, s)
    assert merged.out.item() == pytest.approx(2)
    assert merged.lse.item() == pytest.approx(3e4 + torch.log(torch.tensor(2.0)).item())


def test_a_sink_joins_the_denominator_only_once() -> None:
    g = torch.Generator().manual_seed(0)
    scores, values = torch.randn(2, 3, 5, generator=g, dtype=torch.float64), torch.randn(5, 3, 4, dtype=torch.float64)
    sinks = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)
    with_column = torch.cat([scores, sinks[None, :, None].expand(2, 3, 1)], -1).softmax(-1)[..., :5]
    torch.testing.assert_close(
        apply_sink(*attend(scores, values), sinks), torch.einsum("ths,shd->thd", with_column, values)
    )


def test_the_output_keeps_its_dtype() -> None:
    out, lse = torch.randn(1, 2, 4, dtype=torch.bfloat16), torch.zeros(1, 2)
    assert merge_state(out, lse, out, lse).out.dtype == torch.bfloat16
    assert apply_sink(out, lse, torch.zeros(2)).dtype == torch.bfloat16
