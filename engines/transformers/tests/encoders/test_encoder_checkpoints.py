"""Saved checkpoints of encoder-decoders and encoders are loaded by their families' classes."""

from __future__ import annotations

import pytest
import torch
from family_zoo import NATIVE, NEW_TOKENS, SUBJECTS, dense_logits, tokens_of

from attnplug_transformers import Encoder, Engine
from attnplug_transformers.verify import find_difference


@pytest.mark.parametrize("name", ["bart", "whisper"])
def test_a_saved_encoder_decoder_is_served(request, tmp_path, name):
    case = request.getfixturevalue(name)
    case.model.save_pretrained(tmp_path)
    with Engine.from_pretrained(tmp_path, attention=NATIVE) as engine:
        assert type(engine.model) is type(case.model)
        assert tokens_of(engine.generate(case.inputs, NEW_TOKENS)) == case.tokens


def test_verify_compares_an_encoder_decoder_with_transformers_and_tells_a_difference(bart):
    texts = [one["input_ids"] for one in bart.inputs]
    with Engine(bart.model, attention=NATIVE) as engine:
        ours = tokens_of(engine.generate(texts, NEW_TOKENS))
    sizes = {"max_new_tokens": NEW_TOKENS, "max_context_len": 256}
    assert find_difference(bart.model, texts, ours, **sizes) is None
    right, ours[2][3] = ours[2][3], 42
    assert find_difference(bart.model, texts, ours, **sizes) == (2, 3, 42, right)


@pytest.mark.parametrize("name", ["Bert", "ModernBert"])
def test_an_encoders_head_is_loaded_with_it_where_it_scores_rows(tmp_path, name):
    subject = next(one for one in SUBJECTS if one.model_class.startswith(name))
    model = subject.model()
    model.save_pretrained(tmp_path / "headed")
    model.base_model.save_pretrained(tmp_path / "bare")
    inputs = subject.inputs()
    with Encoder.from_pretrained(tmp_path / "headed", attention=NATIVE) as encoder:
        headed = encoder.encode(inputs)
    for one, got in zip(inputs, headed, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(got.logits, dense_logits(model, one, [], "encoder"))
    if name == "Bert":
        return  # Its base class has a pooler, which a masked language model's checkpoint lacks.
    with Encoder.from_pretrained(tmp_path / "bare", attention=NATIVE) as encoder:
        bare = encoder.encode(inputs)
    for one, other in zip(headed, bare, strict=True):
        assert other.logits is None
        torch.testing.assert_close(one.last_hidden_state, other.last_hidden_state)
