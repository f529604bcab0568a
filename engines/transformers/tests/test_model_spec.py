"""What configs of each family are read as, and that the modules agree."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from attnplug.errors import UnsupportedModel
from attnplug.model_spec import LayerSpec, ModelSpec
from attnplug_transformers import Engine, families
from attnplug_transformers.adapters import find_adapter
from attnplug_transformers.families import Family, decoder_layers, find_family, known_model_types, register_family
from attnplug_transformers.model_spec import model_spec_from_config

SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}


def config_of(model_type: str, **changes: Any) -> Any:
    return AutoConfig.for_model(model_type, **{**SMALL, **changes})


def spec_of(model_type: str, **changes: Any) -> ModelSpec:
    return model_spec_from_config(config_of(model_type, **changes), dtype="float32")


def windows(spec: ModelSpec) -> list[int]:
    return [layer.sliding_window_size for layer in spec.layers]


BUILT_IN = sorted(known_model_types())
LATENT_TYPES = [name for name, family in families._REGISTRY.items() if family.adapter == families.LATENT]


@pytest.mark.parametrize("model_type", BUILT_IN)
def test_the_modules_of_each_family_are_what_its_config_was_read_as(model_type: str) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    changes: dict[str, Any] = {"num_key_value_heads": 4} if model_type in LATENT_TYPES else {}
    if model_type == "phi3":
        changes = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    if model_type == "whisper":
        changes = {"max_source_positions": 512, "max_target_positions": 512, "decoder_attention_heads": 4}
    config = config_of(model_type, **changes)
    spec = model_spec_from_config(config, dtype="float32")
    family = find_family(model_type)
    assert family is not None
    with torch.device("meta"):
        model = getattr(transformers, family.auto_class).from_config(config, attn_implementation="eager")
    layers = find_adapter(model_type, spec).make_layers(model, spec)
    assert [layer.spec for layer in layers.values()] == list(spec.layers)
    assert spec.max_context_len == 512


def test_llama_layers_carry_heads_dims_and_factor() -> None:
    assert spec_of("llama").layers[2] == LayerSpec(
        layer_id=2, num_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=16, scaling=0.25
    )


def test_head_dim_defaults_to_an_even_split_of_the_hidden_size() -> None:
    assert spec_of("mixtral", head_dim=None, num_attention_heads=2).layers[0].head_dim == 32


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("mistral", {"sliding_window": 8}, [7, 7, 7, 7]),
        ("mistral", {"sliding_window": None}, [-1, -1, -1, -1]),
        ("phi3", {"sliding_window": 8}, [7, 7, 7, 7]),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, [-1, -1, 7, 7]),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False}, [-1, -1, -1, -1]),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, [-1, -1, -1, 7]),
        ("gemma2", {"sliding_window": 8}, [7, -1, 7, -1]),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}, [7, -1, 7, -1]),
        ("gpt_oss", {"sliding_window": 8}, [7, -1, 7, -1]),
        ("smollm3", {"sliding_window": 8, "use_sliding_window": True, "no_rope_layer_interval": 4}, [-1, -1, -1, 7]),
        ("olmo2", {}, [-1, -1, -1, -1]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_window_of_w_keys_is_a_sliding_window_size_of_w_minus_1(
    model_type: str, changes: dict[str, Any], expected: list[int]
) -> None:
    assert windows(spec_of(model_type, **changes)) == expected


def test_gemma2_has_its_own_factor_and_a_soft_cap() -> None:
    layer = spec_of("gemma2", query_pre_attn_scalar=64, attn_logit_softcapping=30.0).layers[0]
    assert (layer.scaling, layer.logit_cap) == (0.125, 30.0)


def test_gemma3_without_a_soft_cap_has_none() -> None:
    assert spec_of("gemma3_text", attn_logit_softcapping=None).layers[0].logit_cap == 0.0


def test_granite_takes_its_multiplier_as_the_factor() -> None:
    assert spec_of("granite", attention_multiplier=0.07).layers[0].scaling == pytest.approx(0.07)


def test_gpt_oss_has_sinks_and_llama_none() -> None:
    assert all(layer.has_sinks for layer in spec_of("gpt_oss").layers)
    assert not any(layer.has_sinks for layer in spec_of("llama").layers)


def test_head_counts_that_differ_by_layer_are_each_layers_own() -> None:
    config = config_of("llama")
    if not hasattr(config, "per_layer_config"):
        pytest.skip("this transformers has no per-layer configs")
    config.per_layer_config = {1: {"num_key_value_heads": 1}, 3: {"num_attention_heads": 8}}
    layers = model_spec_from_config(config, dtype="float32").layers
    assert [(layer.num_heads, layer.num_kv_heads) for layer in layers] == [(4, 2), (4, 1), (4, 2), (8, 2)]


def test_rope_that_depends_on_the_batch_is_held_to_the_original_length() -> None:
    factors = [1.0] * 8
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors, "factor": 8.0}
    rope |= {"original_max_position_embeddings": 64, "partial_rotary_factor": 1.0}
    spec = spec_of("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    assert spec.max_context_len == 64


def test_a_llama_like_architecture_without_a_family_is_read_generically() -> None:
    assert "solar_open" not in known_model_types()
    assert spec_of("solar_open").layers[0].scaling == 0.25


@pytest.mark.parametrize(
    ("model_type", "word"),
    [
        ("deepseek_v32", "kv_lora_rank"),
        ("mamba", "num_attention_heads"),
        ("gpt2", "rope_parameters"),
        ("llama4_text", "attention_chunk_size"),
        ("minimax", "linear_attention"),
    ],
)
def test_an_architecture_without_a_family_is_refused_with_reasons_and_what_exists(model_type: str, word: str) -> None:
    with pytest.raises(UnsupportedModel, match=word) as caught:
        model_spec_from_config(AutoConfig.for_model(model_type), dtype="float32")
    assert "llama" in str(caught.value)
    assert families.FAMILIES_GROUP in caught.value.remedy


def test_a_quantised_checkpoint_is_refused_and_its_method_named() -> None:
    with pytest.raises(UnsupportedModel, match=r"quantised \(awq\)"):
        spec_of("llama", quantization_config={"quant_method": "awq", "bits": 4})


@pytest.mark.parametrize("model_type", ["gemma3", "llava"])
def test_a_multimodal_checkpoint_is_refused(model_type: str) -> None:
    with pytest.raises(UnsupportedModel, match="multimodal"):
        model_spec_from_config(AutoConfig.for_model(model_type), dtype="float32")


def test_an_encoder_decoder_without_an_adapter_is_refused_with_those_that_exist_and_how_to_add_one() -> None:
    with pytest.raises(UnsupportedModel, match=r"no family with an adapter .* there are: bart, whisper") as caught:
        model_spec_from_config(AutoConfig.for_model("t5"), dtype="float32")
    assert "Family with encoder_context and an adapter" in caught.value.remedy


def test_the_layers_of_an_encoder_decoder_are_numbered_apart() -> None:
    layers = spec_of(
        "whisper",
        hidden_size=48,
        num_key_value_heads=4,
        num_hidden_layers=2,
        decoder_layers=3,
        decoder_attention_heads=6,
    ).layers
    assert [layer.layer_id for layer in layers] == list(range(8))
    assert [layer.is_cross_attention for layer in layers] == [False] * 3 + [True] * 3 + [False] * 2
    assert [layer.reads_pool for layer in layers] == [True] * 6 + [False] * 2
    sizes = [(layer.num_heads, layer.head_dim, layer.scaling) for layer in layers]
    assert sizes == [(6, 8, 1.0)] * 6 + [(4, 12, 1.0)] * 2


def test_bart_scales_in_the_scores_and_whisper_its_queries() -> None:
    assert spec_of("bart", decoder_attention_heads=4).layers[0].scaling == 0.25


def test_a_local_window_of_an_encoder_counts_keys_on_each_side() -> None:
    assert windows(spec_of("modernbert", local_attention=16, layer_types=None)) == [-1, 8, 8, -1]


def test_widths_that_cannot_be_are_named_together() -> None:
    with pytest.raises(UnsupportedModel, match=r"encoder_attention_heads 7; d_model 64 .* decoder_attention_heads 5"):
        spec_of("bart", num_attention_heads=7, decoder_attention_heads=5)


def test_a_bert_that_decodes_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="is_decoder is set"):
        spec_of("bert", is_decoder=True)


def test_a_bidirectional_gemma_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="use_bidirectional_attention"):
        spec_of("gemma3_text", use_bidirectional_attention=True)


def test_layers_of_another_kind_are_named() -> None:
    config = config_of("qwen3")
    config.layer_types = ["full_attention", "linear_attention", "full_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match="layer 1 is 'linear_attention'"):
        model_spec_from_config(config, dtype="float32")


def test_a_model_that_masks_by_a_rule_of_its_own_is_refused_when_it_first_runs() -> None:
    config = config_of("doge", keep_window_size=4)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with Engine(model) as engine, pytest.raises(UnsupportedModel, match="mask of its own"):
        engine.generate([[1, 2, 3, 4, 5, 6, 7, 8]], max_new_tokens=2)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Family]:
    copy = dict(families._REGISTRY)
    monkeypatch.setattr(families, "_REGISTRY", copy)
    return copy


def test_a_third_partys_family_serves_its_model_type(registry: dict[str, Family]) -> None:
    register_family(Family("mine", ("my_llama",), decoder_layers))
    config = config_of("llama")
    config.model_type = "my_llama"
    assert len(model_spec_from_config(config, dtype="bfloat16").layers) == 4


def test_a_family_does_not_take_anothers_model_type_unasked(registry: dict[str, Family]) -> None:
    family = Family("mine", ("llama",), decoder_layers)
    with pytest.raises(ValueError, match="llama"):
        register_family(family)
    register_family(family, replace=True)
    assert find_family("llama") is family


class _Point(SimpleNamespace):
    def load(self) -> Any:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


def announce(monkeypatch: pytest.MonkeyPatch, *loaded: Any) -> None:
    points = [
        _Point(name="acme", value="acme:layers", loaded=one, dist=SimpleNamespace(name=f"acme-{i}", version="1.0"))
        for i, one in enumerate(loaded)
    ]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: points if group == families.FAMILIES_GROUP else []
    )


def test_an_announced_family_is_loaded_at_its_first_use(
    registry: dict[str, Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(monkeypatch, decoder_layers)
    assert "acme" in known_model_types()
    assert "acme" not in registry
    found = find_family("acme")
    assert found is not None
    assert found.layers is decoder_layers


def test_an_announced_family_that_fails_to_import_is_named(
    registry: dict[str, Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(monkeypatch, ImportError("no module acme"))
    with pytest.raises(UnsupportedModel, match=r"acme-0 1\.0 failed to load: ImportError: no module acme"):
        find_family("acme")


def test_two_distributions_that_announce_one_family_are_both_named(
    registry: dict[str, Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(monkeypatch, decoder_layers, decoder_layers)
    with pytest.raises(UnsupportedModel, match=r"acme-0 1\.0, acme-1 1\.0"):
        find_family("acme")


def test_the_documents_table_has_every_family_and_its_model_types() -> None:
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    table = {row[0]: sorted(re.findall("`([^`]+)`", row[1])) for row in rows}
    registered: dict[str, list[str]] = {}
    for model_type, family in families._REGISTRY.items():
        registered.setdefault(family.name, []).append(model_type)
    assert {name: table.get(name) for name in registered} == {name: sorted(t) for name, t in registered.items()}
