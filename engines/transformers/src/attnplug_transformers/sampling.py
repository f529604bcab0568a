"""From logits to tokens: greedy, or by temperature, top-k and top-p with a generator of the request's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from attnplug.errors import ConfigError

__all__ = ["SamplingParams", "choose"]


_TINY = torch.finfo(torch.float32).tiny
"""What is smaller than this is 0 in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request chooses its tokens, and where it stops."""

    temperature: float = 0.0
    """0: the likeliest token, always."""
    top_p: float = 1.0
    """Keep the likeliest tokens whose probabilities reach this sum."""
    top_k: int = 0
    """Keep this many tokens; 0: all."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else is in the batch; None: another each time."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, beside the model's own end tokens; they are part of it."""
    ignore_eos: bool = False
    """Go on after the model's end tokens."""

    def __post_init__(self) -> None:
        given: Any = self
        stop, ids = _as_tuple(given.stop), _as_tuple(given.stop_token_ids)
        faults = []
        if not _is_number(given.temperature) or not 0 <= given.temperature < float("inf"):
            faults.append(f"temperature is {given.temperature!r}; allowed: 0 (greedy) or a positive number")
        if not _is_number(given.top_p) or not 0 < given.top_p <= 1:
            faults.append(f"top_p is {given.top_p!r}; allowed: above 0, at most 1")
        if not _is_count(given.top_k):
            faults.append(f"top_k is {given.top_k!r}; allowed: 0 (all tokens) or a positive whole number")
        if given.seed is not None and not isinstance(given.seed, Integral):
            faults.append(f"seed is {given.seed!r}; allowed: a whole number, or None")
        if stop is None or not all(isinstance(text, str) and text for text in stop):
            faults.append(f"stop is {given.stop!r}; allowed: texts of at least one character")
        if ids is None or not all(map(_is_count, ids)):
            faults.append(f"stop_token_ids is {given.stop_token_ids!r}; allowed: token ids")
        if faults:
            raise ConfigError("sampling: " + "; ".join(faults), key="sampling")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    def keeps_all(self, vocabulary: int) -> bool:
        """Whether neither top-k nor top-p leaves out a token of so many."""
        return self.top_p == 1.0 and (self.top_k == 0 or self.top_k >= vocabulary)


def _as_tuple(given: Any) -> tuple[Any, ...] | None:
    if isinstance(given, str):
        return (given,)
    return tuple(given) if isinstance(given, Iterable) else None


def _is_number(given: Any) -> bool:
    return isinstance(given, Real) and given is not True and given is not False


def _is_count(given: Any) -> bool:
    return isinstance(given, Integral) and given is not True and given is not False and int(given) >= 0


def choose(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """Choose a token a row, on the device; nothing synchronises.

    Args:
        logits: [n, vocabulary], any float dtype, any device; not changed.
        params: One a row.
        uniforms: A number of [0, 1) a row, from its request's generator; not read for greedy rows.

    Returns:
        [n] int64 token ids, in memory of their own.
    """
    tokens = torch.argmax(logits, dim=-1)
    sampled = [row for row, one in enumerate(params) if not one.is_greedy]
    # Which way a row goes is its own parameters' to say: the two order tokens differently, so a neighbour's would give
    # the same seed another token.
    filtered = [row for row in sampled if not params[row].keeps_all(logits.shape[-1])]
    plain = [row for row in sampled if row not in filtered] if filtered else sampled
    for rows, draw in ((plain, _draw), (filtered, _draw_filtered)):
        if rows:
            index = _on(logits.device, rows, torch.int64)
            chosen = draw(logits[index], [params[row] for row in rows], [uniforms[row] for row in rows])
            tokens = tokens.index_copy(0, index, chosen)
    return tokens


def _on(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return numbers of the host as a tensor of the device, without waiting for what it runs."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return _on(device, values, torch.float32).unsqueeze(-1)


def _probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    # From the largest down, so that a temperature near 0 makes -inf of the others, and no inf - inf of all.
    below = logits.float() - logits.float().amax(-1, keepdim=True)
    return torch.softmax(below / _column([max(one.temperature, _TINY) for one in params], logits.device), dim=-1)


def _draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """Draw by inverting the cumulative distribution: one uniform number a token, so the device does not matter."""
    return _invert(_probabilities(logits, params), _column(uniforms, logits.device)).squeeze(-1)


def _draw_filtered(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """Draw of the likeliest tokens that top-k and top-p keep, from the likeliest down."""
    device, vocabulary = logits.device, logits.shape[-1]
    probs, order = torch.sort(_probabilities(logits, params), dim=-1, descending=True, stable=True)
    # top-p counts what top-k kept as the whole, as transformers' warpers in their order do.
    kept = _column([float(one.top_k or vocabulary) for one in params], device)
    probs = torch.where(torch.arange(vocabulary, device=device) < kept, probs, torch.zeros_like(probs))
    probs = probs / probs.sum(-1, keepdim=True)
    before = torch.cumsum(probs, dim=-1) - probs
    reach = _column([max(one.top_p, _TINY) for one in params], device)
    probs = torch.where(before < reach, probs, torch.zeros_like(probs))
    return torch.gather(order, -1, _invert(probs, _column(uniforms, device))).squeeze(-1)


def _invert(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first index whose cumulative weight exceeds ``uniform · total``, [n, 1]; never one of weight 0."""
    totals = torch.cumsum(probs, dim=-1)
    # A uniform of nearly 1 rounds to the total itself; the last index below it is the last with a weight.
    target = torch.minimum(uniforms * totals[:, -1:], torch.nextafter(totals[:, -1:], torch.zeros_like(uniforms)))
    # Logits that are NaN lead past the end; that request's text is lost, and must not take the whole step with it.
    return torch.searchsorted(totals, target, right=True).clamp_max(probs.shape[-1] - 1)
