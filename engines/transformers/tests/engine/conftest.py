from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from attnplug_transformers import Engine

NATIVE = {"attention": {"prefill": "torch_native", "decode": "torch_native"}}
VOCABULARY = 257


class Oracle(NamedTuple):
    """A model with a copy of it that no engine touches."""

    model: Any
    copy: Any

    def greedy(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        out = self.copy.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens)
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens


def _oracle(make: Callable[[], Any]) -> Oracle:
    torch.manual_seed(3)
    model, copy = make().eval(), make().eval()
    copy.load_state_dict(model.state_dict())
    copy.set_attn_implementation("eager")
    for one in (model, copy):
        one.generation_config.do_sample = False
        one.generation_config.pad_token_id = 0
    return Oracle(model, copy)


_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 256,
    # Larger than the default, so that tokens differ from step to step.
    "initializer_range": 0.3,
}


@pytest.fixture(scope="session")
def llama() -> Oracle:
    return _oracle(lambda: LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **_SIZES)))


@pytest.fixture(scope="session")
def qwen3() -> Oracle:
    return _oracle(lambda: Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=2, head_dim=16, **_SIZES)))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Prompts of very different lengths."""
    rng = random.Random(5)
    return [[rng.randrange(256) for _ in range(n)] for n in (1, 150, 17, 64, 2, 33, 16)]


@pytest.fixture(scope="session")
def expected(llama: Oracle, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers' eager attention makes of ``prompts`` with the Llama, 24 tokens each."""
    return [llama.greedy(prompt, 24) for prompt in prompts]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, as byte-level tokenizers name bytes; token 256 is special and ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw)
    made.add_special_tokens({"eos_token": "<end>"})
    return made


@pytest.fixture(scope="session")
def serve() -> Callable[..., Engine]:
    """Make an engine on torch_native that checks every batch."""

    def make(oracle: Oracle, *args: Any, **options: Any) -> Engine:
        if "backend_factory" not in options:
            options.setdefault("attention", NATIVE)
        options.setdefault("kv_cache_bytes", 64 << 20)
        return Engine(oracle.model, *args, check_batches=True, **options)

    return make
