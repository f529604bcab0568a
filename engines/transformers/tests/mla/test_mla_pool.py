"""What is kept and read: latent rows of the pool's dtype, and the model's own weights in place."""

from __future__ import annotations

import pytest
import torch
from mla_world import FORMS, NEW_TOKENS, Oracle, Recorder, make_case, make_config, make_oracle, tokens_of

from attnplug.kv.pools import MLAKVPool
from attnplug.kv.quant import quantize
from attnplug.modes import MlaForm
from attnplug.spec import Feature
from attnplug_torch_native.backend import TorchNativeBackend
from attnplug_transformers.adapters import mla


def test_the_pool_holds_one_latent_row_a_token(v3, serve):
    engine = serve(v3.oracle.model, page_size=16, num_pages=20)
    pool = engine.backend.leaves().__next__().env.kv_pool
    assert isinstance(pool, MLAKVPool)
    config = v3.oracle.model.config
    width = config.kv_lora_rank + config.qk_rope_head_dim
    assert pool.nbytes() == 21 * 16 * width * 4 * config.num_hidden_layers


def through_fp8(oracle: Oracle) -> Oracle:
    """Make the untouched copy read its latents as an fp8 pool would give them."""
    for layer in oracle.copy.model.layers:
        module = layer.self_attn

        def expand(latent, rope, module=module):
            stored = [quantize(x, 1.0, torch.float8_e4m3fn).to(x.dtype) for x in (latent, rope)]
            return type(module).expand_kv(module, *stored)

        module.expand_kv = expand
    return oracle


@pytest.fixture(scope="module")
def fp8():
    oracle = through_fp8(make_oracle(make_config("v3-yarn")))
    prompts = make_case("v3-yarn").prompts
    return oracle, prompts, oracle.greedy(prompts)


@pytest.mark.parametrize("page_size", [1, 16])
def test_an_fp8_pool_gives_the_tokens_of_rounded_latents(fp8, serve, page_size):
    oracle, prompts, expected = fp8
    engine = serve(
        oracle.model,
        backend_factory=lambda env: Recorder(env, [], FORMS - {Feature.MLA_ABSORBED}),
        attention={"attention": {"kv_dtype": "float8_e4m3fn", "page_size": page_size}},
        chunk_size=40,
    )
    assert tokens_of(engine.generate(prompts, NEW_TOKENS)) == expected
    assert expected != make_case("v3-yarn").expected, "rounding that changes no token proves nothing"


def test_prefix_chunks_are_expanded_from_what_an_fp8_pool_holds(fp8, serve):
    oracle, prompts, _ = fp8
    stored, chunks = [], []

    class Watcher(TorchNativeBackend):
        def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True, extras=None):
            if layer.layer_id == 0 and extras.mla_form is MlaForm.ONE_SHOT:
                stored.append(torch.cat([extras.latent, extras.k_rope], dim=-1))
            if layer.layer_id == 0 and extras.mla_form is MlaForm.CHUNKED_PREFIX:
                chunks.append((k, v))
            return super().forward_extend(q, k, v, layer, batch, save_kv_cache, extras)

    attention = {"attention": {"kv_dtype": "float8_e4m3fn", "page_size": 16}}
    engine = serve(oracle.model, backend_factory=Watcher, attention=attention, chunk_size=100)
    engine.generate(prompts[1:2], 2)
    (keys, values), (first, _) = chunks[0], stored
    module = oracle.model.model.layers[0].self_attn
    rounded = quantize(first, 1.0, torch.float8_e4m3fn).float()
    heads = module.kv_b_proj(rounded[:, :16]).view(100, 4, 12 + 10)
    assert torch.equal(keys[..., :12], heads[..., :12])
    assert torch.equal(keys[..., 12:], rounded[:, None, 16:].expand(-1, 4, -1))
    assert torch.equal(values, heads[..., 12:])
    assert not torch.equal(rounded, first)


def test_absorption_reads_the_models_weights_in_place(v3, serve, monkeypatch):
    operands = []
    real = torch.bmm

    def spy(a, b):
        operands.append(b.untyped_storage().data_ptr())
        return real(a, b)

    engine = serve(v3.oracle.model)
    monkeypatch.setattr(mla.torch, "bmm", spy)
    engine.generate(v3.prompts[:1], 2)
    weights = {layer.self_attn.kv_b_proj.weight.untyped_storage().data_ptr() for layer in v3.oracle.model.model.layers}
    assert weights <= set(operands)


def test_weights_that_their_owner_changes_count_from_the_next_step(serve):
    oracle = make_oracle(make_config("v2"))
    prompts = make_case("v2").prompts[:3]
    engine = serve(oracle.model)
    engine.generate(prompts, 2)
    with torch.no_grad():
        for one in (oracle.model, oracle.copy):
            one.model.layers[1].self_attn.kv_b_proj.weight.mul_(-0.5)
    assert tokens_of(engine.generate(prompts, NEW_TOKENS)) == oracle.greedy(prompts)
