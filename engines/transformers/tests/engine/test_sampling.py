from __future__ import annotations

import pytest
import torch

from attnplug.errors import ConfigError
from attnplug_transformers import SamplingParams
from attnplug_transformers.sampling import choose


def draw(probs: list[float], count: int, **params) -> list[float]:
    """Return how often each token is drawn, by uniforms that are spread evenly."""
    logits = torch.tensor(probs).log().expand(count, -1)
    uniforms = [(i + 0.5) / count for i in range(count)]
    tokens = choose(logits, [SamplingParams(**params)] * count, uniforms).tolist()
    return [tokens.count(i) / count for i in range(len(probs))]


def test_tokens_come_as_often_as_their_probability():
    assert draw([0.1, 0.6, 0.3], 1000, temperature=1.0) == pytest.approx([0.1, 0.6, 0.3], abs=2e-3)


def test_temperature_sharpens():
    weights = torch.tensor([0.1, 0.6, 0.3]) ** 2
    want = (weights / weights.sum()).tolist()
    assert draw([0.1, 0.6, 0.3], 1000, temperature=0.5) == pytest.approx(want, abs=2e-3)


def test_top_k_keeps_the_likeliest():
    assert draw([0.1, 0.6, 0.3], 900, temperature=1.0, top_k=2) == pytest.approx([0, 2 / 3, 1 / 3], abs=2e-3)


def test_top_p_keeps_the_token_that_reaches_the_sum():
    assert draw([0.1, 0.6, 0.3], 900, temperature=1.0, top_p=0.61) == pytest.approx([0, 2 / 3, 1 / 3], abs=2e-3)
    assert draw([0.1, 0.6, 0.3], 900, temperature=1.0, top_p=0.6) == pytest.approx([0, 1, 0])
    assert draw([0.1, 0.6, 0.3], 900, temperature=1.0, top_p=1e-9) == pytest.approx([0, 1, 0])


def test_numbers_that_float32_has_not_take_the_likeliest():
    assert draw([0.1, 0.6, 0.3], 9, temperature=1e-300) == [0, 1, 0]
    assert draw([0.1, 0.6, 0.3], 9, temperature=1.0, top_p=1e-300) == [0, 1, 0]


def test_logits_that_are_no_numbers_still_give_a_token_of_the_vocabulary():
    logits = torch.tensor([[float("nan")] * 4, [0.0, 0.0, 0.0, 50.0]])
    for extra in ({}, {"top_p": 0.9}):
        tokens = choose(logits, [SamplingParams(temperature=1.0, **extra)] * 2, [0.5, 0.999])
        assert 0 <= int(tokens[0]) < 4
        assert int(tokens[1]) == 3


def test_top_p_counts_what_top_k_kept_as_the_whole():
    # Of 0.4 and 0.3, the first has 0.57: enough alone for 0.5, though of all it has 0.4 only.
    assert draw([0.4, 0.3, 0.3], 900, temperature=1.0, top_k=2, top_p=0.5) == pytest.approx([1, 0, 0])


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(uniform):
    logits = torch.tensor([[float("-inf"), 0.0, 1.0, float("-inf")]])
    for extra in ({}, {"top_p": 0.99}):
        assert choose(logits, [SamplingParams(temperature=1.0, **extra)], [uniform])[0] in (1, 2)


def test_greedy_and_sampled_rows_share_a_batch():
    logits = torch.tensor([[0.0, 2.0, 1.0]] * 3)
    params = [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=5.0, top_k=1)]
    assert choose(logits, params, [0.0, 0.0, 0.99]).tolist() == [1, 0, 1]


@pytest.mark.parametrize("neighbour", [{"top_p": 0.5}, {"top_k": 3}, {"top_p": 1.0}], ids=str)
@pytest.mark.parametrize("own", [{}, {"top_k": 50}, {"top_p": 0.7}, {"top_k": 5}], ids=str)
def test_a_row_draws_the_same_token_whatever_its_neighbours_ask(own, neighbour):
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    mine, other = SamplingParams(temperature=1.0, **own), SamplingParams(temperature=0.8, **neighbour)
    uniforms = [(i + 0.5) / 60 for i in range(60)]
    alone = [int(choose(logits, [mine], [one])) for one in uniforms]
    beside = [
        int(choose(logits.expand(3, -1), [other, mine, SamplingParams()], [0.3, one, 0.0])[1]) for one in uniforms
    ]
    assert len(set(alone)) > 1
    assert beside == alone


@pytest.mark.parametrize(
    "wrong",
    [
        *({"temperature": one} for one in (-1.0, float("nan"), float("inf"), "1", None, True)),
        *({"top_p": one} for one in (0.0, 1.5, "0.5", None)),
        *({"top_k": one} for one in (-2, 2.5, None, True)),
        *({"seed": one} for one in ("x", 1.5, [1])),
        *({"stop": one} for one in (("",), None, (5,), (b"x",))),
        *({"stop_token_ids": one} for one in (5, None, ("a",), (-1,), "ab")),
    ],
    ids=str,
)
def test_parameters_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"sampling: {next(iter(wrong))}"):
        SamplingParams(**wrong)


def test_a_seed_gives_the_same_tokens_whatever_else_runs(llama, prompts, serve):
    params = SamplingParams(temperature=1.3, top_p=0.9, seed=11)
    engine = serve(llama, page_size=16)
    (alone,) = engine.generate(prompts[2:3], 20, params)
    others = [SamplingParams(temperature=0.7)] * len(prompts)
    others[2] = params
    together = engine.generate(prompts, 20, others)[2]
    squeezed = serve(llama, page_size=1, num_pages=190, kv_cache_bytes=None, chunk_size=5)
    assert squeezed.generate(prompts, 20, others)[2].token_ids == together.token_ids == alone.token_ids
    assert engine.generate(prompts[2:3], 20, SamplingParams(temperature=1.3, seed=12))[0] != alone
