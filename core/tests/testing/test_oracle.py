"""The oracle against numbers that can be checked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from attnplug.testing.oracle import Problem, Rules, attend, visibility


def problem(n: int, length: int, *, heads: int = 1, kv_heads: int = 1, values: list[float] | None = None) -> Problem:
    """All scores are zero, and key i has value i: an output is the mean of the visible indices."""
    v = torch.arange(float(length)) if values is None else torch.tensor(values)
    return Problem(
        torch.zeros(n, heads, 2, dtype=torch.float64),
        torch.zeros(length, kv_heads, 2, dtype=torch.float64),
        v.double()[:, None, None].expand(length, kv_heads, 1),
        torch.arange(length - n, length),
        torch.arange(length),
    )


def means(one: Problem, **rules: object) -> list[float]:
    return attend(one, Rules(scaling=1.0, **rules)).out[:, 0, 0].tolist()  # type: ignore[arg-type]


def test_causality_is_bottom_right() -> None:
    assert means(problem(2, 5)) == pytest.approx([1.5, 2.0])


def test_a_window_of_w_shows_w_plus_one_keys() -> None:
    seen = visibility(problem(2, 6), Rules(scaling=1.0, window=2))
    assert seen.int().tolist() == [[0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1]]
    assert visibility(problem(1, 4), Rules(scaling=1.0, window=0)).int().tolist() == [[0, 0, 0, 1]]


def test_a_window_without_causality_reaches_to_both_sides() -> None:
    both = visibility(problem(5, 5), Rules(scaling=1.0, window=1, causal="none"))
    assert both.int().tolist()[2] == [0, 1, 1, 1, 0]


def test_the_lse_is_a_natural_log_over_scaled_capped_scores() -> None:
    one = problem(1, 4)
    assert attend(one, Rules(scaling=1.0)).lse.item() == pytest.approx(math.log(4))
    sharp = one._replace(
        q=torch.tensor([[[3.0, 0.0]]]).double(), k=torch.tensor([[[1.0, 0.0]]]).double().expand(4, 1, 2)
    )
    capped = attend(sharp, Rules(scaling=0.5, cap=2.0)).lse.item()
    assert capped == pytest.approx(2.0 * math.tanh(1.5 / 2.0) + math.log(4))


def test_a_sink_takes_weight_and_gives_no_value() -> None:
    sink = torch.tensor([math.log(4.0)]).double()
    got = attend(problem(1, 4, values=[8.0] * 4), Rules(scaling=1.0), sink)
    assert got.out.item() == pytest.approx(4.0)
    assert got.lse.item() == pytest.approx(math.log(4))
    twice = attend(problem(1, 4, values=[9.0] * 4), Rules(scaling=1.0, sinks="twice"), sink)
    assert twice.out.item() == pytest.approx(3.0)


def test_query_heads_read_their_own_group() -> None:
    one = problem(1, 1, heads=4, kv_heads=2)
    one = one._replace(v=torch.tensor([[[1.0], [2.0]]]).double())
    assert attend(one, Rules(scaling=1.0)).out.flatten().tolist() == [1.0, 1.0, 2.0, 2.0]
    assert attend(one, Rules(scaling=1.0, grouping="interleaved")).out.flatten().tolist() == [1.0, 2.0, 1.0, 2.0]


def test_a_tree_shows_ancestors_only() -> None:
    tree = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]).bool()
    one = problem(3, 4)._replace(tree=tree)
    assert means(one) == pytest.approx([0.5, 1.0, 4 / 3])


def test_a_row_that_sees_nothing_is_zero_with_an_lse_of_minus_infinity() -> None:
    got = attend(problem(1, 1), Rules(scaling=1.0, keys="but_newest"))
    assert got.out.item() == 0.0
    assert got.lse.item() == float("-inf")


def test_what_is_hidden_may_be_nan() -> None:
    one = problem(1, 3, values=[float("nan"), 4.0, 6.0])
    assert attend(one, Rules(scaling=1.0, window=1)).out.item() == pytest.approx(5.0)


def test_long_problems_are_cut_without_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    one = problem(7, 9, heads=2)
    one = one._replace(q=torch.randn(7, 2, 2).double(), k=torch.randn(9, 1, 2).double())
    whole = attend(one, Rules(scaling=0.7))
    monkeypatch.setattr("attnplug.testing.oracle.CHUNK_CELLS", 40)
    assert torch.allclose(attend(one, Rules(scaling=0.7)).out, whole.out, rtol=0, atol=1e-15)
