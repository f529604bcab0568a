"""In float32 logits are off by no more than rounding, so that the smallest wrong rule shows, which tokens may hide."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from family_zoo import GENERATING, NATIVE, Subject, dense_logits
from test_bf16 import FORCED, Forced, smooth

from attnplug.model_spec import LayerSpec, ModelSpec
from attnplug.modes import AttentionType
from attnplug.spec import Kind
from attnplug_transformers import Engine, attention, engine, sites
from attnplug_transformers.model_spec import model_spec_from_config

BUDGET = 2e-5
"""Of the logits' standard deviation, in the root of the mean square."""


def difference(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return how far the engine's logits are from transformers' eager ones, as a share of their standard deviation."""
    oracle = smooth(subject).model()
    given, forced = subject.inputs()[1], [5 * place % 190 + 3 for place in range(FORCED)]
    with torch.inference_mode():
        theirs = dense_logits(oracle, given, forced, subject.kind).double()[-FORCED - 1 : -1]
    told = Forced(forced, monkeypatch)
    with Engine(copy.deepcopy(oracle), attention=NATIVE, page_size=16, chunk_size=33, num_pages=64) as served:
        served.generate([given], FORCED)
    ours = torch.stack(told.rows[:FORCED]).double()
    return float((ours - theirs).pow(2).mean().sqrt() / theirs.std())


@pytest.mark.parametrize("subject", GENERATING, ids=lambda one: one.name)
def test_logits_are_off_by_rounding_alone(subject, monkeypatch):
    assert difference(subject, monkeypatch) < BUDGET


def _scaling(layer: LayerSpec) -> LayerSpec:
    return replace(layer, scaling=1.001 * layer.scaling)


def _key_more(layer: LayerSpec) -> LayerSpec:
    window = layer.sliding_window_size
    return replace(layer, sliding_window_size=window + (window >= 0))


def _key_less(layer: LayerSpec) -> LayerSpec:
    window = layer.sliding_window_size
    return replace(layer, sliding_window_size=window - (window >= 0))


def _no_window(layer: LayerSpec) -> LayerSpec:
    return replace(layer, sliding_window_size=-1)


def _window_for_all(layer: LayerSpec) -> LayerSpec:
    decodes = layer.attn_type is AttentionType.DECODER and not layer.is_cross_attention
    return replace(layer, sliding_window_size=7) if decodes and layer.kind is Kind.SOFTMAX else layer


def _cap(layer: LayerSpec) -> LayerSpec:
    return replace(layer, logit_cap=1.001 * layer.logit_cap)


WRONG = (_scaling, _key_more, _key_less, _no_window, _window_for_all, _cap)
CAN_BE_WRONG = [
    (subject, wrong)
    for subject in GENERATING
    for wrong in WRONG
    if subject.module == "transformers"
    and any(wrong(one) != one for one in model_spec_from_config(subject.config(), dtype="float32").layers)
]


@pytest.mark.parametrize(
    ("subject", "wrong"), CAN_BE_WRONG, ids=[f"{one.name}-{wrong.__name__[1:]}" for one, wrong in CAN_BE_WRONG]
)
def test_a_wrong_rule_shows(subject, wrong, monkeypatch):
    def misread(config, *, dtype: str) -> ModelSpec:
        spec = model_spec_from_config(config, dtype=dtype)
        return replace(spec, layers=tuple(map(wrong, spec.layers)))

    def unchecked(step, module, *_):
        if step.seen is not None:
            step.seen.append(module)
        return step.layers[module]

    # The comparisons with the modules would refuse it first.
    monkeypatch.setattr(engine, "model_spec_from_config", misread)
    monkeypatch.setattr(sites, "_differences", lambda module, layer: iter(()))
    monkeypatch.setattr(attention, "_check_call", unchecked)
    assert difference(subject, monkeypatch) > 5 * BUDGET


def test_every_wrong_rule_is_tried_on_a_family():
    assert {wrong for _, wrong in CAN_BE_WRONG} == set(WRONG)
