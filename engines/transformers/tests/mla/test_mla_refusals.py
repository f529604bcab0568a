"""What cannot be served is refused with every reason, before weights load where the config tells."""

from __future__ import annotations

import json

import pytest
from mla_world import FORMS, NATIVE, Recorder, make_config

import attnplug_torch_native.spec as native
from attnplug.errors import BackendRejected, UnsupportedModel
from attnplug.spec import Feature, Kind
from attnplug.wrappers.hybrid import HybridAttnBackend
from attnplug_transformers import Engine
from attnplug_transformers.model_spec import model_spec_from_config


@pytest.fixture
def without_weights(tmp_path):
    """A folder with a config and nothing else: what gets past it fails otherwise."""
    make_config("v3").save_pretrained(tmp_path)
    return tmp_path


def declare(monkeypatch, **changes):
    monkeypatch.setattr(native, "SPEC", native.SPEC.replace(**changes))


def reasons_of(caught, name="torch_native"):
    return {reason.field: reason for reason in caught.value.reasons[name]}


def test_a_backend_without_mla_is_refused_before_weights_load(without_weights, monkeypatch):
    declare(monkeypatch, kinds=frozenset({Kind.SOFTMAX}), features=native.SPEC.features - FORMS)
    with pytest.raises(BackendRejected) as caught:
        Engine.from_pretrained(without_weights, attention=NATIVE)
    assert {"kinds", "mla_forms"} <= set(reasons_of(caught))


def test_a_backend_that_cannot_decode_latents_is_refused_before_weights_load(without_weights, monkeypatch):
    declare(monkeypatch, features=native.SPEC.features - {Feature.MLA_ABSORBED})
    with pytest.raises(BackendRejected) as caught:
        Engine.from_pretrained(without_weights, attention=NATIVE)
    assert reasons_of(caught)["mla_forms"].asked == "mla_absorbed"


def test_with_a_backend_that_can_the_missing_weights_are_told(without_weights):
    with pytest.raises(UnsupportedModel, match="weights"):
        Engine.from_pretrained(without_weights, attention=NATIVE)


def test_an_fp8_checkpoint_is_refused_before_weights_load(without_weights):
    file = without_weights / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    file.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"quantised \(fp8\)"):
        Engine.from_pretrained(without_weights, attention=NATIVE)


@pytest.mark.parametrize(
    ("prefill_lacks", "decode_lacks", "refused"),
    [
        ({Feature.MLA_ABSORBED, Feature.MLA_CHUNKED_PREFIX}, set(), "prefill"),
        ({Feature.MLA_ABSORBED, Feature.LSE}, set(), "prefill"),
        (set(), {Feature.MLA_ABSORBED}, "decode"),
    ],
)
def test_a_backend_made_by_hand_that_lacks_a_form_is_refused_at_once(v3, serve, prefill_lacks, decode_lacks, refused):
    def pair(env):
        return HybridAttnBackend(
            Recorder(env, [], frozenset(prefill_lacks)), Recorder(env, [], frozenset(decode_lacks))
        )

    with pytest.raises(BackendRejected) as caught:
        serve(v3.oracle.model, backend_factory=pair)
    assert f"({refused})" in reasons_of(caught)["mla_forms"].asked


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2; allowed: num_attention_heads, 4"),
        ({"kv_lora_rank": 0, "v_head_dim": None}, "kv_lora_rank is 0.*v_head_dim is None"),
        ({"index_topk": 8}, "index_topk"),
    ],
)
def test_a_config_that_asks_for_other_attention_is_refused(changes, words):
    config = make_config("v3")
    for name, value in changes.items():
        vars(config)[name] = value
    with pytest.raises(UnsupportedModel, match=words):
        model_spec_from_config(config, dtype="float32")


def test_the_spec_of_a_latent_model_names_its_widths():
    layers = model_spec_from_config(make_config("v3-yarn"), dtype="float32").layers
    assert {layer.kind for layer in layers} == {Kind.MLA}
    assert {(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim) for layer in layers} == {
        (4, 4, 20, 10)
    }
    assert {(layer.kv_lora_rank, layer.qk_rope_head_dim) for layer in layers} == {(16, 8)}


def test_two_sublayers_of_a_block_are_two_layers():
    layers = model_spec_from_config(make_config("longcat-flash"), dtype="float32").layers
    assert [layer.layer_id for layer in layers] == [0, 1, 2, 3]
