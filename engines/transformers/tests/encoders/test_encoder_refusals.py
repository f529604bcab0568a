"""What an encoder can never read is refused at once, with every reason; what no family serves, before weights load."""

from __future__ import annotations

import pytest
import torch
from family_zoo import NATIVE, SUBJECTS, make_case

from attnplug.errors import BackendRejected, ConfigError, UnsupportedModel
from attnplug.spec import Feature
from attnplug_torch_native.spec import SPEC
from attnplug_transformers import Encoder, Engine, RequestRefused, loading


def subject_of(name: str):
    return next(one for one in SUBJECTS if one.model_class.startswith(name))


def test_bad_encoder_inputs_are_named_together(bart, serve):
    engine = serve(bart.model, num_encoder_pages=4, num_pages=20)
    prompts = [
        [3, 4],
        [],
        list(range(3, 120)),
        [3] * 300,
        [999],
        {"decoder_input_ids": [2]},
        {"input_ids": [3], "decoder_input_ids": [900]},
        {"input_ids": [3], "labels": [1]},
        torch.randn(8, 100),
    ]
    with pytest.raises(RequestRefused) as caught:
        engine.generate(prompts, 4)
    problems = caught.value.problems
    assert sorted(problems) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert problems[1] == ("input_ids: it has no tokens; allowed: at least one",)
    assert "117 encoder rows need more than the encoder space's 4 pages of 16" in problems[2][0]
    assert "300 tokens for an encoder of 256" in problems[3][0]
    assert "token 999 is outside the vocabulary" in problems[4][0]
    assert "allowed: input_ids, and decoder_input_ids" in problems[5][0]
    assert "token 900 is outside the vocabulary" in problems[6][0]
    assert "labels" in problems[7][0]
    assert "input_ids" in problems[8][0]
    assert not engine.has_work


def test_features_of_another_shape_are_refused_with_the_right_one(whisper, serve):
    with pytest.raises(RequestRefused, match=r"\(8, 99\).*allowed: \(8, 100\)") as caught:
        serve(whisper.model).generate([torch.randn(8, 99), [1, 2], torch.ones(8, 100, dtype=torch.int64)], 4)
    assert sorted(caught.value.problems) == [0, 1, 2]


def test_encoder_pages_for_a_model_without_an_encoder_are_refused():
    with pytest.raises(ConfigError, match="this model's decoder reads no encoder"):
        Engine(make_case(SUBJECTS[0]).model, attention=NATIVE, num_encoder_pages=4)


def test_an_engine_sends_encoders_to_the_encoder_and_the_other_way_round():
    with pytest.raises(UnsupportedModel, match="generates nothing") as caught:
        Engine(subject_of("Bert").model(), attention=NATIVE)
    assert "attnplug_transformers.Encoder" in caught.value.remedy
    model = make_case(SUBJECTS[0]).model.model
    with pytest.raises(UnsupportedModel, match="it generates"):
        Encoder(model, attention=NATIVE)


def test_a_head_that_reads_several_rows_is_refused():
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification(subject_of("Bert").config())
    with pytest.raises(UnsupportedModel, match="reads more than one row"):
        Encoder(model, attention=NATIVE)


def test_bad_inputs_of_an_encoder_are_named_together():
    with Encoder(subject_of("Bert").model(), attention=NATIVE) as encoder:
        with pytest.raises(RequestRefused) as caught:
            encoder.encode([[3], [], [3] * 300, [999], "text"])
        assert sorted(caught.value.problems) == [1, 2, 3, 4]
        with pytest.raises(ConfigError, match="a list of texts"):
            encoder.encode("text")
        for inputs in (None, 5, {"input_ids": [3]}):
            with pytest.raises(ConfigError, match=r"inputs is .* a list of texts"):
                encoder.encode(inputs)


@pytest.mark.parametrize("size", ["max_batch_size", "max_num_tokens"])
@pytest.mark.parametrize("value", [0, 1.5, "8"])
def test_sizes_of_an_encoder_that_cannot_be_are_refused(size, value):
    with pytest.raises(ConfigError, match=f"{size} .*{value!r}.* allowed: at least 1"):
        Encoder(subject_of("Bert").model(), attention=NATIVE, **{size: value})


@pytest.fixture
def no_weights(monkeypatch):
    """Fail a test that opens weights; yields nothing."""

    def load(self, **_):
        raise AssertionError("weights were read")

    monkeypatch.setattr(loading.CheckpointSource, "load", load)


def without(monkeypatch, *features: Feature) -> None:
    """Let the only installed backend of a test declare less."""
    from attnplug_torch_native import spec

    monkeypatch.setattr(spec, "SPEC", SPEC.replace(features=SPEC.features - set(features)))


def test_the_guard_sees_weights_that_are_read(no_weights, tmp_path):
    subject_of("Bart").config().save_pretrained(tmp_path)
    with pytest.raises(AssertionError, match="weights were read"):
        Engine.from_pretrained(tmp_path, attention=NATIVE)


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("Bart", Feature.CROSS_ATTENTION),
        ("Whisper", Feature.ENCODER_ONLY),
        ("GptOss", Feature.SINKS),
        ("Gemma2", Feature.SOFTCAP),
        ("Mistral", Feature.SLIDING_WINDOW),
    ],
)
def test_a_feature_that_no_installed_backend_has_is_refused_before_weights(
    no_weights, monkeypatch, tmp_path, name, feature
):
    subject_of(name).config().save_pretrained(tmp_path)
    without(monkeypatch, feature)
    with pytest.raises(BackendRejected) as caught:
        Engine.from_pretrained(tmp_path, attention=NATIVE)
    assert feature.value in str(caught.value).lower()


def test_an_encoder_that_no_backend_serves_is_refused_before_weights(no_weights, monkeypatch, tmp_path):
    subject_of("ModernBert").config().save_pretrained(tmp_path)
    without(monkeypatch, Feature.ENCODER_ONLY)
    with pytest.raises(BackendRejected, match="encoder_only"):
        Encoder.from_pretrained(tmp_path, attention=NATIVE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised"),
        ({"model_type": "t5"}, "no family with an adapter for one reads it"),
        ({"model_type": "gpt2"}, "no family reads architecture"),
        ({"model_type": "llava"}, "multimodal"),
        ({"model_type": "bert"}, "generates nothing"),
    ],
)
def test_what_cannot_be_served_is_refused_before_weights(no_weights, tmp_path, changes, words):
    from transformers import AutoConfig

    kind = changes.get("model_type")
    config = AutoConfig.for_model(kind) if kind else subject_of("Llama").config()
    for name, value in changes.items():
        if name != "model_type":
            setattr(config, name, value)
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=words):
        Engine.from_pretrained(tmp_path, attention=NATIVE)


@pytest.mark.parametrize(
    ("name", "head"), [("Qwen2", "Qwen2ForSequenceClassification"), ("Bart", "BartForQuestionAnswering")]
)
def test_a_classifiers_checkpoint_is_refused_before_weights(no_weights, tmp_path, name, head):
    config = subject_of(name).config()
    config.tie_word_embeddings, config.architectures = True, [head]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=f"was saved as {head}, which gives no scores of next tokens"):
        Engine.from_pretrained(tmp_path, attention=NATIVE)
