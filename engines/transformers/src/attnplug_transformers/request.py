"""One request's state inside the engine."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum

from .detokenize import TextStream
from .encoder_input import EncoderInput
from .results import FinishReason
from .sampling import SamplingParams

__all__ = ["EngineRequest", "RequestStatus"]


class RequestStatus(Enum):
    """Where a request is."""

    WAITING = "waiting"
    """Holds no row and no pages; after a preemption, still those of its encoder."""
    RUNNING = "running"
    """Holds a row of ``req_to_token`` and pages."""
    ENDING = "ending"
    """Its last token is computed but not known yet; holds no row and no pages of the decoder."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class EngineRequest:
    """A prompt with what was generated for it. The scheduler owns row, pages and ``num_computed``."""

    request_id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    params: SamplingParams
    end_ids: frozenset[int]
    """Tokens that end it."""
    max_len: int
    """Most tokens of prompt and output together: the context."""
    text: TextStream | None = None
    """Where its text grows, if it streams text or watches for stop strings."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and output: all that is known, whether its keys are in the pool or not."""
    num_computed: int = 0
    """How many of the tokens have their keys and values in the pool."""
    num_ahead: int = 0
    """Tokens after ``tokens`` that a step has chosen on the device and the host does not know yet."""
    pages: list[int] = field(default_factory=list)
    encoder: EncoderInput | None = None
    """What its encoder reads; None where the model has none."""
    encoder_pages: list[int] = field(default_factory=list)
    """Pages of the encoder space, from admission to its end; a preemption keeps them."""
    encoded: bool = False
    """Whether the encoder's keys and values are in the pool."""
    row: int = 0
    """Row of ``req_to_token``; 0 while it waits."""
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    error: str = ""
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = [*self.prompt]
        self.rng = random.Random(self.params.seed)

    @property
    def output(self) -> list[int]:
        """The tokens generated so far; a preemption keeps them."""
        return self.tokens[len(self.prompt) :]

    @property
    def length(self) -> int:
        """How many tokens it has, those that the host does not know yet too."""
        return len(self.tokens) + self.num_ahead

    @property
    def num_pending(self) -> int:
        """Tokens that are not in the pool yet: 1 while decoding."""
        return self.length - self.num_computed

    @property
    def is_full(self) -> bool:
        """Whether it has as many tokens as it may have."""
        return self.length - len(self.prompt) >= self.max_new_tokens or self.length >= self.max_len

    @property
    def is_decoding(self) -> bool:
        """Whether all but the newest generated token is in the pool."""
        return self.num_pending == 1 and self.num_computed >= len(self.prompt)

    def append(self, token: int) -> None:
        """Take a generated token and decide whether it was the last."""
        self.tokens.append(token)
        stopped = self.text is not None and self.text.push(token)
        if token in self.end_ids or stopped:
            self.finish_reason = "stop"
        elif self.is_full and not self.num_ahead:
            self.finish_reason = "length"
