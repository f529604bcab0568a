"""Compare greedy completions with what transformers' own eager attention gives for the same model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .encoder_intake import decoder_start
from .intake import end_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Difference", "eager_greedy", "find_difference"]


class Difference(NamedTuple):
    """Where a completion first differs from transformers'."""

    prompt: int
    """Which prompt, from 0."""
    position: int
    """Which new token, from 0."""
    ours: int | None
    """The engine's token; None where its completion has ended."""
    theirs: int | None
    """That of transformers; None where its completion has ended."""


def find_difference(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    max_context_len: int,
    on_prompt: Callable[[], None] = lambda: None,
) -> Difference | None:
    """Return the first difference, in the order of the prompts; None where all are identical.

    Args:
        model: The engine's model, between steps.
        prompts: Token ids; an encoder-decoder's encoder reads them.
        completions: The engine's new tokens for each.
        max_new_tokens: What the engine was given.
        max_context_len: The engine's: a completion ends there too.
        on_prompt: Called after each prompt.
    """
    start = decoder_start(model) if model.config.is_encoder_decoder else None
    for index, (prompt, ours) in enumerate(zip(prompts, completions, strict=True)):
        most = min(max_new_tokens, max_context_len - len(prompt if start is None else start))
        theirs = eager_greedy(model, prompt, most) if start is None else _eager_decoder(model, prompt, start, most)
        on_prompt()
        if list(ours) != theirs:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
            return Difference(index, at, ours[at] if at < len(ours) else None, theirs[at] if at < len(theirs) else None)
    return None


@torch.inference_mode()
def eager_greedy(model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Return the likeliest tokens after a prompt by transformers' eager attention and its own dense cache.

    Args:
        model: In evaluation mode.
        prompt: Token ids, alone in their batch.
        max_new_tokens: Most new tokens; an end token ends them before, and is among them.
    """
    from transformers import DynamicCache

    end_ids = end_token_ids(model)
    # Its older name is deprecated where the newer is there.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    options = {name: DynamicCache(config=model.config), "use_cache": True, "logits_to_keep": 1}
    inputs, tokens = torch.tensor([list(prompt)], device=model.device), list[int]()
    with _eager(model):
        while len(tokens) < max_new_tokens:
            tokens.append(int(model(inputs, **options).logits[0, -1].argmax()))
            if tokens[-1] in end_ids:
                break
            inputs = inputs.new_tensor([tokens[-1:]])
    return tokens


@torch.inference_mode()
def _eager_decoder(
    model: PreTrainedModel, prompt: Sequence[int], start: Sequence[int], max_new_tokens: int
) -> list[int]:
    """Return the likeliest tokens of a decoder after an encoder, with what is known computed anew for each."""
    end_ids, tokens = end_token_ids(model), list[int]()
    encoder: Any = model.get_encoder()
    with _eager(model):
        encoded = (encoder(input_ids=torch.tensor([list(prompt)], device=model.device)).last_hidden_state,)
        while len(tokens) < max_new_tokens and not end_ids.intersection(tokens[-1:]):
            known = torch.tensor([[*start, *tokens]], device=model.device)
            output = model(encoder_outputs=encoded, decoder_input_ids=known, use_cache=False)
            tokens.append(int(output.logits[0, -1].argmax()))
    return tokens


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
