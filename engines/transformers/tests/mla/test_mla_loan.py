"""A served model stays its owner's, and its modules are compared with what was read of its config."""

from __future__ import annotations

import threading

import pytest
import torch
from mla_world import NEW_TOKENS, Recorder, make_config, make_oracle, tokens_of
from torch import nn

from attnplug.errors import ContractViolation, UnsupportedModel
from attnplug_torch_native.backend import TorchNativeBackend


def attention(oracle, layer):
    return oracle.model.model.layers[layer].self_attn


def test_the_model_computes_as_before_between_steps(v3, serve):
    model, ids = v3.oracle.model, torch.tensor([v3.prompts[3]])
    with torch.no_grad():
        before = model(ids).logits
        engine = serve(model)
        engine.add_request(v3.prompts[2], 8)
        engine.step()
        assert torch.equal(model(ids).logits, before)
    assert all("expand_kv" not in vars(layer.self_attn) for layer in model.model.layers)


def test_the_model_is_given_back_when_a_step_fails(v3, serve):
    class Broken(TorchNativeBackend):
        def forward_extend(self, *args, **kwargs):
            raise RuntimeError("a kernel failed")

    engine = serve(v3.oracle.model, backend_factory=Broken)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        engine.generate(v3.prompts[:1], 2)
    assert all("expand_kv" not in vars(layer.self_attn) for layer in v3.oracle.model.model.layers)
    assert tokens_of(serve(v3.oracle.model).generate(v3.prompts, NEW_TOKENS)) == v3.expected


def test_an_owners_own_expansion_is_put_back(v3, serve):
    module = attention(v3.oracle, 0)

    def own(latent, rope):
        return type(module).expand_kv(module, latent, rope)

    module.expand_kv = own
    try:
        serve(v3.oracle.model).generate(v3.prompts[:1], 2)
        assert module.expand_kv is own
    finally:
        del module.expand_kv


def test_another_thread_is_told_that_the_model_is_in_a_step(v3, serve):
    caught: list[BaseException] = []

    class Intruded(TorchNativeBackend):
        def forward_extend(self, *args, **kwargs):
            if not caught:

                def call() -> None:
                    try:
                        v3.oracle.model(torch.tensor([v3.prompts[2]]))
                    except ContractViolation as error:
                        caught.append(error)

                thread = threading.Thread(target=call)
                thread.start()
                thread.join(timeout=30)
            return super().forward_extend(*args, **kwargs)

    serve(v3.oracle.model, backend_factory=Intruded).generate(v3.prompts[:1], 2)
    assert "in another thread" in str(caught[0])


@pytest.mark.parametrize(
    ("attribute", "value", "name"),
    [
        ("scaling", 0.5, "scaling"),
        ("qk_head_dim", 4, "head_dim"),
        ("v_head_dim", 20, "v_head_dim"),
        ("kv_lora_rank", 3, "kv_lora_rank"),
        ("qk_rope_head_dim", 4, "qk_rope_head_dim"),
    ],
)
def test_a_module_that_differs_from_its_config_is_refused(v3, serve, monkeypatch, attribute, value, name):
    monkeypatch.setattr(attention(v3.oracle, 1), attribute, value)
    with pytest.raises(UnsupportedModel, match=f"layer 1: {name} is .* in the model, .* in its ModelSpec"):
        serve(v3.oracle.model)


def test_a_projection_that_is_not_plain_is_refused(serve):
    oracle = make_oracle(make_config("v2"))
    module = attention(oracle, 2)
    module.kv_b_proj = nn.Sequential(module.kv_b_proj)
    with pytest.raises(UnsupportedModel, match=r"layer 2: .* is a Sequential; allowed: an nn\.Linear"):
        serve(oracle.model)


def test_modules_that_do_not_expand_in_a_method_of_their_own_are_refused(v3, serve, monkeypatch):
    monkeypatch.delattr(type(attention(v3.oracle, 0)), "expand_kv")
    with pytest.raises(UnsupportedModel, match=r"layer 0: .* no method expand_kv") as caught:
        serve(v3.oracle.model)
    assert "transformers" in caught.value.remedy


def test_a_module_that_expands_before_it_is_asked_is_refused_in_the_first_step(v3, serve, monkeypatch):
    kind = type(attention(v3.oracle, 0))
    real, expand = kind.forward, kind.expand_kv

    def forward(self, *args, **kwargs):
        vars(self)["expand_kv"] = lambda latent, rope: expand(self, latent, rope)
        return real(self, *args, **kwargs)

    engine = serve(v3.oracle.model, backend_factory=lambda env: Recorder(env, []))
    monkeypatch.setattr(kind, "forward", forward)
    with pytest.raises(UnsupportedModel, match=r"latent rows \(heads, width\): the call has \(4, 20\).* \(1, 16\)"):
        engine.generate(v3.prompts[:1], 2)
