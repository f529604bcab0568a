"""A family names the adapter that serves its models; third parties bring both."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType, SimpleNamespace

import pytest
from mla_world import NEW_TOKENS, make_config, tokens_of

from attnplug.errors import UnsupportedModel
from attnplug.model_spec import LayerSpec, ModelSpec
from attnplug.spec import Kind
from attnplug_transformers import Engine, families
from attnplug_transformers.adapters import find_adapter
from attnplug_transformers.adapters.decoder import DecoderAdapter
from attnplug_transformers.adapters.mla import MlaAdapter
from attnplug_transformers.families import Family, decoder_layers, register_family
from attnplug_transformers.latent import latent_layers


def spec_of(*kinds):
    layers = tuple(LayerSpec(layer_id=index, kind=kind) for index, kind in enumerate(kinds))
    return ModelSpec(name="a model", layers=layers, dtype="float32", max_context_len=8)


SOFTMAX = spec_of(Kind.SOFTMAX)


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(families, "_REGISTRY", dict(families._REGISTRY))


class Counting(MlaAdapter):
    """A third party's: MLA, with its bridges counted."""

    made = 0

    def make_bridge(self, model, layers, serving, sizes):
        type(self).made += 1
        return super().make_bridge(model, layers, serving, sizes)


@pytest.fixture
def acme(monkeypatch, registry):
    """An installed distribution that announces a family with an adapter for a model type of its own."""
    module = ModuleType("acme_adapters")
    module.Counting, module.INSTANCE, module.NONE = Counting, Counting(), object()
    monkeypatch.setitem(sys.modules, "acme_adapters", module)
    family = Family("acme's", ("named_by_the_entry_point",), latent_layers, adapter="acme_adapters:Counting")
    point = SimpleNamespace(
        name="acme", value="acme:FAMILY", load=lambda: family, dist=SimpleNamespace(name="acme", version="1.0")
    )
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [point] if group == families.FAMILIES_GROUP else []
    )


@pytest.mark.parametrize(
    ("model_type", "kind", "adapter"),
    [
        ("llama", Kind.SOFTMAX, DecoderAdapter),
        ("deepseek_v3", Kind.MLA, MlaAdapter),
        ("of no family", Kind.SOFTMAX, DecoderAdapter),
    ],
)
def test_the_family_decides_and_without_one_it_is_a_decoder(model_type, kind, adapter):
    assert type(find_adapter(model_type, spec_of(kind))) is adapter


def test_layers_of_a_kind_that_the_adapter_does_not_serve_are_refused():
    with pytest.raises(UnsupportedModel, match=r"a model has linear, mla layers; adapter .*:DecoderAdapter' .*softmax"):
        find_adapter("llama", spec_of(Kind.MLA, Kind.LINEAR, Kind.SOFTMAX))


def test_a_third_partys_adapter_serves_its_models(v3, serve, acme, monkeypatch):
    monkeypatch.setattr(v3.oracle.model.config, "model_type", "acme")
    before = Counting.made
    engine = serve(v3.oracle.model)
    assert Counting.made == before + 1
    assert tokens_of(engine.generate(v3.prompts[:3], NEW_TOKENS)) == v3.expected[:3]


def test_an_adapter_may_be_an_object(acme):
    register_family(Family("other", ("other",), decoder_layers, adapter="acme_adapters:INSTANCE"))
    assert isinstance(find_adapter("other", spec_of(Kind.MLA)), Counting)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("no_such_module:Adapter", "failed to load: ModuleNotFoundError"),
        ("acme_adapters:Missing", "failed to load: AttributeError"),
        ("acme_adapters", "failed to load"),
        ("acme_adapters:NONE", "allowed: an attnplug_transformers.adapters.base.Adapter"),
    ],
)
def test_an_adapter_that_is_none_is_named_with_its_family(acme, reference, words):
    register_family(Family("wrong", ("wrong",), decoder_layers, adapter=reference))
    with pytest.raises(UnsupportedModel, match=words) as caught:
        find_adapter("wrong", SOFTMAX)
    assert "family 'wrong'" in str(caught.value)


def test_a_broken_adapter_is_told_before_weights_load(acme, tmp_path):
    register_family(Family("wrong", ("deepseek_v3",), latent_layers, adapter="no_such_module:Adapter"), replace=True)
    make_config("v3").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="ModuleNotFoundError"):
        Engine.from_pretrained(tmp_path)
