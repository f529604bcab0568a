"""Tiny MLA models beside untouched copies, and a backend that records what it is asked."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import transformers

from attnplug.assembly.env import BackendEnv
from attnplug.modes import ForwardMode, MlaForm
from attnplug.spec import Feature
from attnplug.wrappers.hybrid import HybridAttnBackend
from attnplug_torch_native.backend import TorchNativeBackend

NATIVE = {"attention": {"prefill": "torch_native", "decode": "torch_native"}}
NEW_TOKENS = 14
FORMS = frozenset({Feature.MLA_ABSORBED, Feature.MLA_ONE_SHOT, Feature.MLA_CHUNKED_PREFIX})

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 48,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 256,
    # Larger than the default, so that tokens differ from step to step.
    "initializer_range": 0.3,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("DeepseekV2", {}),
    "v2-lite": ("DeepseekV2", {"q_lora_rank": None, "rope_parameters": YARN}),
    "v3": ("DeepseekV3", {}),
    "v3-yarn": ("DeepseekV3", {"rope_parameters": YARN, "n_group": 2, "topk_group": 1}),
    "v3-halves": ("DeepseekV3", {"rope_interleave": False, "q_lora_rank": None, "attention_bias": True}),
    "axk1": ("AXK1", {}),
    "glm4-moe-lite": ("Glm4MoeLite", {}),
    "longcat-flash": (
        "LongcatFlash",
        {
            "num_layers": 2,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 32,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "head_dim": 8,
        },
    ),
    "minicpm3": ("MiniCPM3", {"rope_parameters": PLAIN}),
    "youtu": ("Youtu", {}),
}


class Oracle(NamedTuple):
    """A model with a copy of it that no engine touches."""

    model: Any
    copy: Any

    def greedy(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return what transformers' dense eager attention makes of each prompt, alone."""
        found = []
        for prompt in prompts:
            ids = torch.tensor([list(prompt)])
            out = self.copy.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
            )
            found.append(out[0, len(prompt) :].tolist())
        return found


def make_config(name: str, **changes: Any) -> Any:
    family, special = MODELS[name]
    given = {**SIZES, **special, **changes}
    if family == "LongcatFlash":
        given = {key: value for key, value in given.items() if key != "num_hidden_layers"}
    return getattr(transformers, f"{family}Config")(**given)


def make_oracle(config: Any, seed: int = 3) -> Oracle:
    torch.manual_seed(seed)
    family = getattr(transformers, type(config).__name__.removesuffix("Config") + "ForCausalLM")
    model, copy = family(config).eval(), family(config).eval()
    # Router and norm weights start as constants: random ones tell a wrong row from a right one.
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.copy_(1 + 0.2 * torch.randn_like(weight))
            elif not weight.any():
                weight.copy_(0.3 * torch.randn_like(weight))
    copy.load_state_dict(model.state_dict())
    copy.set_attn_implementation("eager")
    return Oracle(model, copy)


@cache
def prompt_list() -> tuple[tuple[int, ...], ...]:
    rng = random.Random(5)
    return tuple(tuple(rng.randrange(256) for _ in range(n)) for n in (1, 150, 17, 64, 2, 33, 16))


class Case(NamedTuple):
    """A model, prompts of very different lengths, and transformers' tokens for them."""

    oracle: Oracle
    prompts: list[list[int]]
    expected: list[list[int]]


@cache
def make_case(name: str) -> Case:
    oracle = make_oracle(make_config(name))
    prompts = [list(prompt) for prompt in prompt_list()]
    return Case(oracle, prompts, oracle.greedy(prompts))


class Call(NamedTuple):
    """One call of a layer, as the backend got it."""

    mode: ForwardMode
    form: MlaForm
    tokens: int
    chunk: tuple[int, ...]


class Recorder(TorchNativeBackend):
    """torch_native, which declares fewer forms where a test says so, and records what it is asked."""

    def __init__(self, env: BackendEnv, calls: list[Call], without: frozenset[Feature] = frozenset()) -> None:
        super().__init__(env)
        self.spec = self.spec.replace(features=self.spec.features - without)
        self.calls = calls

    def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True, extras=None):  # type: ignore[no-untyped-def]
        if layer.layer_id == 0:
            self.calls.append(Call(batch.forward_mode, extras.mla_form, q.shape[0], extras.chunk_lens_cpu or ()))
        return super().forward_extend(q, k, v, layer, batch, save_kv_cache, extras)


def tokens_of(completions: Any) -> list[list[int]]:
    assert [one.error for one in completions] == [""] * len(completions)
    return [list(one.token_ids) for one in completions]


def expanding(prefill: list[Call], decode: list[Call] | None = None) -> Callable[[BackendEnv], HybridAttnBackend]:
    """Return a factory of two backends: one that cannot absorb serves prefill, one that only absorbs serves decode."""
    decoded: list[Call] = [] if decode is None else decode
    return lambda env: HybridAttnBackend(
        Recorder(env, prefill, frozenset({Feature.MLA_ABSORBED})),
        Recorder(env, decoded, FORMS - {Feature.MLA_ABSORBED}),
    )
