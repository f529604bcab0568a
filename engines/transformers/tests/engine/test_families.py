"""Other families than the Llamas: windows, caps, sinks, experts; prompts of many windows."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models import gemma2, gemma3, gpt_oss, mistral, olmo2, phi3, qwen2, qwen3_moe

from attnplug_transformers import Engine

_SIZES = {
    "vocab_size": 200,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 199,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
_EXPERTS = {"num_experts_per_tok": 2}
CONFIGS = {
    "mistral": lambda: mistral.MistralConfig(sliding_window=16, **_SIZES),
    "phi3": lambda: phi3.Phi3Config(sliding_window=16, **_SIZES),
    "qwen2": lambda: qwen2.Qwen2Config(use_sliding_window=True, sliding_window=16, max_window_layers=1, **_SIZES),
    "gemma2": lambda: gemma2.Gemma2Config(
        head_dim=16, query_pre_attn_scalar=24, sliding_window=16, attn_logit_softcapping=2.0, **_SIZES
    ),
    "gemma3": lambda: gemma3.Gemma3TextConfig(
        head_dim=16, query_pre_attn_scalar=24, sliding_window=16, layer_types=_ALTERNATING, **_SIZES
    ),
    "gpt_oss": lambda: gpt_oss.GptOssConfig(head_dim=16, sliding_window=16, num_local_experts=4, **_EXPERTS, **_SIZES),
    "olmo2": lambda: olmo2.Olmo2Config(**_SIZES),
    "qwen3_moe": lambda: qwen3_moe.Qwen3MoeConfig(
        head_dim=16, num_experts=4, moe_intermediate_size=32, **_EXPERTS, **_SIZES
    ),
}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize("family", CONFIGS)
def test_tokens_are_those_of_eager_attention(family):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="eager").eval()
    rng = random.Random(1)
    prompts = [[rng.randrange(199) for _ in range(n)] for n in (3, 100, 17, 40)]
    want = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        want.append(out[0, len(prompt) :].tolist())
    assert len({token for tokens in want for token in tokens}) > 8, "an oracle that repeats itself proves little"
    for page_size, chunk_size in ((1, 7), (16, None), (64, 33)):
        engine = Engine(
            model,
            attention={"attention": {"prefill": "torch_native", "decode": "torch_native"}},
            page_size=page_size,
            chunk_size=chunk_size,
            num_pages=400,
            check_batches=True,
        )
        assert [one.token_ids for one in engine.generate(prompts, 20)] == want
