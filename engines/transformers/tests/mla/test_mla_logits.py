"""Teacher-forced logits in bfloat16 stay within what bfloat16 itself costs, measured on transformers' own attention."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from mla_world import FORMS, SIZES, YARN, Recorder, expanding, make_config, make_oracle
from torch import Tensor

from attnplug.spec import Feature
from attnplug_transformers import latent
from attnplug_transformers.latent import _magnitude
from attnplug_transformers.runner import ModelRunner

FACTOR = 4.0
"""Between two right computations: each has its own roundings, and a row its luck. Here it comes to 1.8 at
most, and a factor without YaRN's magnitude to 19."""
LENGTH, PROMPT = 120, 90
ALL_EXPERTS = {"num_experts_per_tok": SIZES["n_routed_experts"]}
"""Each token goes to every expert, so that no rounding sends it to others: logits then depend on them smoothly."""


class Measured(NamedTuple):
    """A model in bfloat16, and what that dtype costs it."""

    model: Any
    tokens: list[int]
    truth: Tensor
    """[LENGTH, vocabulary]: the same weights computed in float32, by eager attention."""
    allowed: Tensor
    """[LENGTH]: what a row's logits may be off, from what eager attention in bfloat16 is off."""


def cast(model: Any, dtype: torch.dtype) -> Any:
    """Change the weights' dtype alone: rotary frequencies stay as they are, as when a checkpoint is loaded."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    return model


@cache
def measure(name: str) -> Measured:
    oracle = make_oracle(make_config(name, initializer_range=0.1, **ALL_EXPERTS))
    ids = torch.randint(0, 256, (1, LENGTH), generator=torch.Generator().manual_seed(7))
    model = cast(oracle.model, torch.bfloat16)
    oracle.copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        truth = oracle.copy(ids, use_cache=False).logits[0]
        eager = cast(oracle.copy, torch.bfloat16)(ids, use_cache=False).logits[0].float()
    error = (eager - truth).abs().amax(dim=-1)
    return Measured(model, ids[0].tolist(), truth, FACTOR * error.clamp_min(float(error.quantile(0.9))))


def forced_logits(engine, model, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return the logits after each token: of a prompt in chunks, then of decode steps that are told what to say."""
    rows = []
    left = iter(tokens[PROMPT:])
    run = ModelRunner.run

    def forced(runner, inputs):
        told = torch.full_like(run(runner, inputs), -1.0)
        for row in told:
            row[next(left, 0)] = 1.0
        return told

    monkeypatch.setattr(ModelRunner, "run", forced)
    hook = model.model.register_forward_hook(lambda module, args, output: rows.append(output.last_hidden_state[0]))
    try:
        engine.generate([tokens[:PROMPT]], LENGTH - PROMPT + 1)
    finally:
        hook.remove()
    with torch.no_grad():
        return model.lm_head(torch.cat(rows)).float()


def share_of_budget(logits: Tensor, case: Measured) -> float:
    """Return the largest share of its allowance that a row takes."""
    assert logits.shape == case.truth.shape
    return float(((logits - case.truth).abs().amax(dim=-1) / case.allowed).max())


@pytest.mark.parametrize("name", ["v2", "v3-yarn"])
@pytest.mark.parametrize(
    ("factory", "page_size", "chunk_size"),
    [
        pytest.param(expanding([]), 16, 32, id="expanded in chunks"),
        pytest.param(expanding([]), 1, 7, id="many small chunks"),
        pytest.param(lambda env: Recorder(env, []), 64, None, id="one shot"),
        pytest.param(lambda env: Recorder(env, [], FORMS - {Feature.MLA_ABSORBED}), 16, 32, id="absorbed"),
    ],
)
def test_logits_are_within_the_budget(serve, monkeypatch, name, factory, page_size, chunk_size):
    case = measure(name)
    attention = {"attention": {"page_size": page_size}}
    engine = serve(case.model, backend_factory=factory, attention=attention, chunk_size=chunk_size)
    logits = forced_logits(engine, case.model, case.tokens, monkeypatch)
    assert share_of_budget(logits, case) <= 1.0


def test_the_budget_tells_a_factor_without_yarns_magnitude(serve, monkeypatch):
    case = measure("v3-yarn")
    assert _magnitude(YARN) > 1.1
    monkeypatch.setattr(latent, "_magnitude", lambda rope: 1.0)
    for layer in case.model.model.layers:
        monkeypatch.setattr(layer.self_attn, "scaling", layer.self_attn.qk_head_dim**-0.5)
    logits = forced_logits(serve(case.model), case.model, case.tokens, monkeypatch)
    assert share_of_budget(logits, case) > 1.0
