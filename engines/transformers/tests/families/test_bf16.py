"""Teacher-forced logits in bfloat16 are off by little more than those of transformers' own bfloat16 attention."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from family_zoo import ENCODERS, GENERATING, NATIVE, dense_logits
from torch import Tensor

from attnplug_transformers import Encoder, Engine
from attnplug_transformers.batch_builder import StepInputs
from attnplug_transformers.runner import ModelRunner

FACTOR = 2.0
"""Between the root mean squares of two right computations, whose roundings differ; a row's largest has its luck too."""
FORCED = 24
SMOOTH = 0.15
SENSITIVE = [one for one in GENERATING if one.model_class.startswith(("Olmo2", "Bart", "Whisper"))]
"""Models whose logits tell a change of their scores; the others' bfloat16 hides a tenth."""


def cast(model, dtype: torch.dtype):
    """Change the weights' dtype alone: rotary frequencies stay as they are, as when a checkpoint is loaded."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("final_logits_bias"):
            buffer.data = buffer.data.to(dtype)
    return model


class Forced:
    """Stands around a runner: keeps a request's logits, and makes the token that is told likeliest."""

    def __init__(self, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.rows = iter(tokens), list[Tensor]()
        run = ModelRunner.run

        def forced(runner: ModelRunner, inputs: StepInputs) -> Tensor:
            logits = run(runner, inputs)
            told = torch.full_like(logits, -1.0)
            for row, one in zip(told, logits, strict=True):
                self.rows.append(one.float())
                row[next(self.left, 3)] = 1.0
            return told

        monkeypatch.setattr(ModelRunner, "run", forced)


def check_budget(ours: Tensor, theirs: Tensor, truth: Tensor) -> None:
    """Assert that an error is within what bfloat16 costs transformers, over all rows and in the worst one."""

    def error(one: Tensor) -> Tensor:
        return (one.double() - truth.double()).abs()

    mine, allowed = error(ours), error(theirs)
    assert mine.isfinite().all()
    assert allowed.max() > 0, "an oracle without rounding allows nothing"
    assert allowed.pow(2).mean().sqrt() < truth.std() / 4, "an oracle lost in rounding allows everything"
    assert mine.pow(2).mean().sqrt() <= FACTOR * allowed.pow(2).mean().sqrt()
    assert mine.max() <= 2 * FACTOR * allowed.max()


def smooth(subject):
    """Return a subject whose logits do not jump at a rounding, as weights that make greedy tokens differ make them."""
    if "init_std" not in subject.sizes:
        return subject
    return dataclasses.replace(subject, sizes={**subject.sizes, "init_std": SMOOTH})


def in_three(subject):
    """Return a model in bfloat16 for the engine, one for the oracle, and the same weights in float32."""
    model = cast(smooth(subject).model(), torch.bfloat16)
    return model, copy.deepcopy(model), cast(copy.deepcopy(model), torch.float32)


@pytest.mark.parametrize("subject", GENERATING, ids=lambda one: one.name)
def test_logits_are_within_the_budget_in_prompts_and_in_decoding(subject, monkeypatch):
    model, oracle, exact = in_three(subject)
    given, forced = subject.inputs()[1], [5 * place % 190 + 3 for place in range(FORCED)]
    precise = given
    if subject.kind == "speech":
        given = given | {"input_features": given["input_features"].to(torch.bfloat16)}
        precise = given | {"input_features": given["input_features"].float()}
    with torch.inference_mode():
        truth = dense_logits(exact, precise, forced, subject.kind)
        theirs = dense_logits(oracle, given, forced, subject.kind).float()
    rows = slice(-FORCED - 1, -1)
    engine = Engine(model, attention=NATIVE, page_size=16, chunk_size=33, num_pages=64, check_batches=True)
    told = Forced(forced, monkeypatch)
    engine.generate([given], FORCED)
    check_budget(torch.stack(told.rows[:FORCED]), theirs[rows], truth[rows])


@pytest.mark.parametrize("subject", ENCODERS, ids=lambda one: one.name)
def test_an_encoders_rows_are_within_the_budget(subject):
    model, oracle, exact = in_three(subject)
    got = Encoder(model, attention=NATIVE).encode(subject.inputs())
    ours, theirs, truth = [], [], []
    for one, given in zip(got, subject.inputs(), strict=True):
        with torch.inference_mode():
            truth.append(dense_logits(exact, given, [], "encoder"))
            theirs.append(dense_logits(oracle, given, [], "encoder").float())
        ours.append(one.logits.float())
    check_budget(torch.cat(ours), torch.cat(theirs), torch.cat(truth))


@pytest.mark.parametrize("subject", SENSITIVE, ids=lambda one: one.name)
def test_the_budget_tells_a_scaling_that_is_off_by_a_tenth(subject, monkeypatch):
    with pytest.raises(AssertionError):
        _served_with_another_scaling(subject, monkeypatch)


def _served_with_another_scaling(subject, monkeypatch):
    from attnplug.layer import AttentionLayer

    original = AttentionLayer.from_spec.__func__

    def off(cls, spec, **options):
        made = original(cls, spec, **options)
        made.scaling = spec.scaling * 1.1
        return made

    monkeypatch.setattr(AttentionLayer, "from_spec", classmethod(off))
    monkeypatch.setattr("attnplug_transformers.attention._check_call", lambda step, module, *_: _note(step, module))
    test_logits_are_within_the_budget_in_prompts_and_in_decoding(subject, monkeypatch)


def _note(step, module):
    if step.seen is not None:
        step.seen.append(module)
    return step.layers[module]
