"""What an engine gives back: whole completions, and the parts of one as they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Completion", "FinishReason", "StepOutput", "StreamChunk"]

FinishReason = Literal["stop", "length", "abort", "error"]
"""``stop``: an end token or a stop string; ``length``: max_new_tokens, or the end of the context."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What was generated for one prompt."""

    token_ids: list[int]
    """The new tokens, an end token included; also where the request failed: those made before."""
    text: str
    """Their text without special tokens, cut before a stop string; empty where the engine has no tokenizer."""
    finish_reason: FinishReason
    error: str = ""
    """Why the request failed, where ``finish_reason`` is ``error``."""


class StepOutput(NamedTuple):
    """What one step made for one request."""

    request_id: int
    token_ids: list[int]
    """New tokens of this step."""
    text: str
    """Text that became certain in this step; empty unless the request streams text."""
    finish_reason: FinishReason | None = None
    """Why the request has ended; None while it runs."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What one step made for one prompt of ``generate_stream``."""

    index: int
    """Which prompt."""
    token_ids: list[int]
    text: str
    """Joined over all chunks of a prompt: its ``Completion.text``. Never part of a character."""
    finish_reason: FinishReason | None = None
    error: str = ""
