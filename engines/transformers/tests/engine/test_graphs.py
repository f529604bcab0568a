"""Emulated graphs, by the path of a GPU: the same tokens, and what cannot be replayed runs eagerly and is counted."""

from __future__ import annotations

import gc
import random
import warnings
import weakref

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from attnplug.errors import ConfigError
from attnplug.modes import GraphLevel
from attnplug_torch_native.backend import TorchNativeBackend
from attnplug_transformers import Engine, SamplingParams

NATIVE = {"attention": {"prefill": "torch_native", "decode": "torch_native"}}


def tokens_of(completions):
    assert [one.error for one in completions] == [""] * len(completions)
    return [one.token_ids for one in completions]


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_batches_that_shrink_and_grow_by_buckets_give_the_same_tokens(llama, prompts, expected, serve, overlap):
    engine = serve(llama, graphs="emulated", graph_buckets=(1, 2, 4), max_batch_size=4, chunk_size=40, overlap=overlap)
    lengths = [24, 3, 17, 24, 9, 20, 2]
    assert tokens_of(engine.generate(prompts, lengths)) == [want[:n] for want, n in zip(expected, lengths)]
    assert engine.graphs.num_replays > 20
    assert set(engine.graphs.eager_steps) == {"extend steps run eagerly", "mixed steps run eagerly"}
    assert engine.pages.num_free == engine.pages.num_pages


def test_a_preempted_request_ends_with_the_same_tokens(llama, prompts, expected, serve):
    engine = serve(llama, graphs="emulated", page_size=1, num_pages=190, kv_cache_bytes=None, overlap=True)
    some = [0, 2, 3, 4, 5, 6, 1]
    assert tokens_of(engine.generate([prompts[i] for i in some], 24)) == [expected[i] for i in some]
    assert engine.scheduler.num_preemptions > 0
    assert engine.graphs.num_replays > 0
    assert engine.pages.num_free == engine.pages.num_pages


def test_larger_batches_than_the_largest_bucket_run_eagerly_and_are_counted(llama, prompts, expected, serve):
    engine = serve(llama, graphs="emulated", graph_buckets=(2,), max_batch_size=3)
    assert tokens_of(engine.generate(prompts[3:6], [24, 12, 24])) == [expected[3], expected[4][:12], expected[5]]
    assert engine.graphs.eager_steps["3 requests; the largest bucket is 2"] == 11
    assert engine.graphs.num_replays == 12


def test_a_sampled_request_draws_the_same_tokens_from_graphs(llama, prompts, serve):
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=4)
    want = tokens_of(serve(llama).generate(prompts[2:5], 12, sampling))
    got = tokens_of(serve(llama, graphs="emulated", overlap=True).generate(prompts[2:5], 12, sampling))
    assert got == want


def test_a_replay_calls_neither_the_model_nor_the_backend_s_layers(llama, prompts, serve):
    class Counting(TorchNativeBackend):
        calls = 0

        def forward(self, *args, **kwargs):
            type(self).calls += 1
            return super().forward(*args, **kwargs)

    engine = serve(llama, graphs="emulated", backend_factory=Counting, graph_buckets=(1, 2))
    engine.generate(prompts[:1], 4)
    before, replays = Counting.calls, engine.graphs.num_replays
    engine.generate(prompts[:1], 24)
    assert engine.graphs.num_replays - replays == 23
    assert Counting.calls - before == 3, "of the prompt alone, a call a layer"


SIZES = {
    "vocab_size": 200,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 12}


def bart():
    model = BartForConditionalGeneration(
        BartConfig(
            vocab_size=200,
            d_model=48,
            encoder_layers=1,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=64,
            init_std=0.3,
            eos_token_id=None,
            forced_eos_token_id=None,
            decoder_start_token_id=2,
        )
    )
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model


MODELS = {
    "windows and caps": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16, sliding_window=8)),
    "experts": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, head_dim=16, num_experts=4, **EXPERTS)),
    "latent attention": lambda: DeepseekV2ForCausalLM(
        DeepseekV2Config(**{**SIZES, "num_key_value_heads": 6}, **MLA, first_k_dense_replace=2)
    ),
    "encoder-decoder": bart,
}


def generate(model, **options):
    rng = random.Random(2)
    prompts = [[rng.randrange(3, 200) for _ in range(n)] for n in (1, 40, 17, 9)]
    engine = Engine(model, attention=NATIVE, kv_cache_bytes=8 << 20, max_batch_size=3, check_batches=True, **options)
    return tokens_of(engine.generate(prompts, [8, 10, 6, 9])), engine


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_gives_the_same_tokens(name):
    torch.manual_seed(1)
    model = MODELS[name]().eval()
    want, _ = generate(model)
    got, engine = generate(model, graphs="emulated", overlap=True)
    assert got == want
    assert engine.graphs.num_replays > 5
    assert not engine.graphs.refusal


def test_a_model_that_reads_values_on_the_host_runs_eagerly_and_says_where():
    torch.manual_seed(1)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope)).eval()
    want, _ = generate(model)
    with pytest.warns(
        UserWarning, match=r"graphs are off for this engine.*\n.*modeling_rope_utils\.py:\d+ in dynamic_f"
    ):
        got, engine = generate(model, graphs="emulated")
    assert got == want
    assert engine.graphs.num_replays == 0
    assert engine.graphs.eager_steps[engine.graphs.refusal] > 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.generate([[5, 6]], 3)[0].finish_reason == "length", "it is told once"


def test_why_no_step_is_replayed_is_told(llama, prompts, serve):
    class Ungraphed(TorchNativeBackend):
        graph_level = GraphLevel.NONE

    assert serve(llama).graphs.refusal == "graphs need a GPU; this engine runs on cpu"
    off = serve(llama, attention={"attention": {**NATIVE["attention"], "graphs": "off"}})
    assert off.graphs.refusal == "graphs are off"
    none = serve(llama, backend_factory=Ungraphed, graphs="emulated")
    assert none.graphs.refusal == "torch_native serves no graphs here (its graph level is NONE)"
    none.generate(prompts[:1], 3)
    assert none.graphs.facts()["eager_steps"] == {"torch_native serves no graphs here (its graph level is NONE)": 3}


def test_buckets_come_from_the_configuration_and_the_argument_wins(llama, serve):
    configured = {"attention": {**NATIVE["attention"], "graph_buckets": [1, 3]}}
    assert serve(llama, attention=configured).graphs.buckets == (1, 3)
    assert serve(llama, attention=configured, graph_buckets=(2,)).graphs.buckets == (2,)
    assert serve(llama, max_batch_size=5).graphs.buckets == (1, 2, 4, 5)


def test_a_wrong_choice_or_bucket_is_refused_with_what_is_allowed(llama, serve):
    with pytest.raises(ConfigError, match="allowed: auto, off, emulated"):
        serve(llama, graphs="on")
    with pytest.raises(ConfigError, match=r"graph buckets \[9\] with a limit of 4"):
        serve(llama, graph_buckets=(2, 9), max_batch_size=4)


def test_a_closed_engine_has_given_its_graphs_back(llama, prompts, serve):
    with serve(llama, graphs="emulated") as engine:
        engine.generate(prompts[:1], 4)
        runner = weakref.ref(engine.graphs._runner)
    gc.collect()
    assert runner() is None
    assert engine.graphs.refusal == "the engine is closed"
