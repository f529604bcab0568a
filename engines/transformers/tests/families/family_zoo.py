"""A tiny random model of each family, and what transformers' own dense eager attention makes of it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

NATIVE = {"attention": {"prefill": "torch_native", "decode": "torch_native"}}
PAGE_SIZES = (1, 16, 64)
CHUNK_SIZES = (7, 33, None)
BATCH_SIZES = (2, 3, 8)
PROMPT_LENS = (3, 70, 17, 40)
DECODER_LENS = (1, 20, 40, 9)
"""Tokens that decoders after an encoder begin with; PROMPT_LENS are their encoders'."""
WINDOW = 8
NEW_TOKENS = 12
END = 199

_SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    # Larger than the default, so that tokens differ from step to step.
    "initializer_range": 0.3,
}
_TWO_STACKS: dict[str, Any] = {
    "vocab_size": 200,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": END,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "tie_word_embeddings": False,
    # Much larger, so that tokens depend on the encoder.
    "init_std": 1.0,
}
_ENCODER: dict[str, Any] = {**_SIZES, "num_key_value_heads": None, "cls_token_id": 1, "sep_token_id": 2}
_LATENT: dict[str, Any] = {
    **_SIZES,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    # Every token to every expert: no rounding sends it to others, so logits depend on roundings smoothly.
    "num_experts_per_tok": 4,
}
_HALVES = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {"num_experts_per_tok": 4}


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A family's tiny model."""

    model_class: str
    """transformers' class."""
    sizes: dict[str, Any]
    variant: str = ""
    """What sets it apart from another of its class."""
    module: str = "transformers"
    weights: tuple[str, ...] = ()
    """Real weights that tests/test_real_weights.py serves."""

    @property
    def name(self) -> str:
        return f"{self.model_class}{' ' if self.variant else ''}{self.variant}"

    @property
    def kind(self) -> str:
        """'decoder', 'seq2seq', 'speech' or 'encoder'."""
        if self.model_class.startswith("Whisper"):
            return "speech"
        return {"ForCausalLM": "decoder", "ForConditionalGeneration": "seq2seq"}.get(self._head, "encoder")

    @property
    def _head(self) -> str:
        return self.model_class[self.model_class.index("For") :]

    def config(self) -> Any:
        name = self.model_class.removesuffix(self._head)
        made = getattr(import_module(self.module), "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
        return made(**self.sizes)

    def model(self) -> Any:
        torch.manual_seed(1)
        config = self.config()
        config._attn_implementation = "eager"
        model = getattr(import_module(self.module), self.model_class)(config).eval()
        with torch.no_grad():
            for weight in model.parameters():
                # Constants tell no row from another: norms, routers, sinks, biases.
                if weight.dim() == 1:
                    weight.add_(0.2 * torch.randn_like(weight))
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.do_sample = False
        return model

    def inputs(self) -> list[Any]:
        rng = random.Random(1)
        texts = [[rng.randrange(3, END) for _ in range(n)] for n in PROMPT_LENS]
        if self.kind == "decoder" or self.kind == "encoder":
            return texts
        starts = [[2, *(rng.randrange(3, END) for _ in range(n - 1))] for n in DECODER_LENS]
        if self.kind == "seq2seq":
            return [{"input_ids": text, "decoder_input_ids": one} for text, one in zip(texts, starts, strict=True)]
        sounds = torch.randn(len(starts), 8, 100, generator=torch.Generator().manual_seed(1))
        return [{"input_features": one, "decoder_input_ids": start} for one, start in zip(sounds, starts, strict=True)]


SUBJECTS = [
    Subject(model_class="LlamaForCausalLM", sizes=_SIZES, weights=("SmolLM2-135M-Instruct", "GlassLLM")),
    Subject(
        model_class="AcmeLlamaForCausalLM",
        module="acme_llama",
        variant="with other heads in each layer, a third party's",
        sizes={**_SIZES, "head_dim": 8, "heads": [(6, 2), (12, 4), (3, 1)]},
    ),
    Subject(model_class="MistralForCausalLM", sizes={**_SIZES, "sliding_window": WINDOW}),
    Subject(model_class="Phi3ForCausalLM", sizes={**_SIZES, "sliding_window": WINDOW}),
    Subject(
        model_class="Qwen2ForCausalLM",
        sizes={**_SIZES, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    Subject(model_class="Qwen3ForCausalLM", sizes={**_SIZES, "head_dim": 16}),
    Subject(
        model_class="Qwen3MoeForCausalLM",
        sizes={**_SIZES, **_EXPERTS, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32},
    ),
    Subject(
        model_class="Gemma2ForCausalLM",
        sizes={
            **_SIZES,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
        },
    ),
    Subject(
        model_class="Gemma3ForCausalLM",
        sizes={
            **_SIZES,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "layer_types": _HALVES,
        },
    ),
    Subject(model_class="Olmo2ForCausalLM", sizes=_SIZES),
    Subject(
        model_class="GptOssForCausalLM",
        sizes={**_SIZES, **_EXPERTS, "head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 4},
    ),
    Subject(model_class="DeepseekV2ForCausalLM", sizes=_LATENT),
    Subject(model_class="DeepseekV3ForCausalLM", sizes=_LATENT),
    Subject(model_class="BartForConditionalGeneration", sizes=_TWO_STACKS),
    Subject(model_class="MBartForConditionalGeneration", sizes=_TWO_STACKS),
    Subject(
        model_class="WhisperForConditionalGeneration",
        sizes={
            **{name: value for name, value in _TWO_STACKS.items() if name != "max_position_embeddings"},
            "num_mel_bins": 8,
            "max_source_positions": 50,
            "max_target_positions": 256,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    Subject(model_class="BertForMaskedLM", sizes=_ENCODER),
    Subject(model_class="ModernBertForMaskedLM", sizes={**_ENCODER, "local_attention": 2 * WINDOW}),
]
GENERATING = [subject for subject in SUBJECTS if subject.kind != "encoder"]
ENCODERS = [subject for subject in SUBJECTS if subject.kind == "encoder"]


class Case(NamedTuple):
    """A model with the greedy tokens that its own dense attention gives."""

    model: Any
    inputs: list[Any]
    tokens: list[list[int]]


@cache
def make_case(subject: Subject) -> Case:
    model, inputs = subject.model(), subject.inputs()
    return Case(model, inputs, [greedy(model, one, subject.kind) for one in inputs])


def greedy(model: Any, given: Any, kind: str) -> list[int]:
    """Return the likeliest tokens by dense attention over everything known, without any cache."""
    tokens = list[int]()
    with torch.inference_mode():
        while len(tokens) < NEW_TOKENS and END not in tokens:
            tokens.append(int(dense_logits(model, given, tokens, kind)[-1].argmax()))
    return tokens


def dense_logits(model: Any, given: Any, tokens: list[int], kind: str) -> torch.Tensor:
    """Return [positions, vocabulary]: after a decoder's prompt and tokens, or after an encoder-decoder's tokens."""
    if kind in ("decoder", "encoder"):
        return model(torch.tensor([given + tokens])).logits[0]
    known = torch.tensor([[*given["decoder_input_ids"], *tokens]])
    (name,) = set(given) - {"decoder_input_ids"}
    encoder = given[name][None] if kind == "speech" else torch.tensor([given[name]])
    return model(**{name: encoder}, decoder_input_ids=known, use_cache=False).logits[0]


def tokens_of(completions: Any) -> list[list[int]]:
    assert [one.error for one in completions] == [""] * len(completions)
    return [list(one.token_ids) for one in completions]
