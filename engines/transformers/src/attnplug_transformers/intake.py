"""From what a caller gives to requests: everything that can never be served is refused here, all of it at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from operator import index as as_int
from typing import TYPE_CHECKING, Any, TypeAlias

from attnplug.errors import ConfigError

from .detokenize import TextStream, Tokenizer
from .encoder_input import EncoderInput
from .errors import RequestRefused
from .request import EngineRequest
from .sampling import SamplingParams
from .sizes import EngineSizes

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["Intake", "Prompt", "several"]

Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any] | Tensor"
"""A text, or token ids; for an encoder-decoder what its encoder reads, see ``encoder_intake``."""


class Intake:
    """Checks prompts against a model and an engine's sizes.

    Args:
        model: Names the end tokens and the vocabulary.
        tokenizer: Encodes texts; None: token ids only.
        sizes: Context and pool.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer | None, sizes: EngineSizes) -> None:
        self._tokenizer, self._sizes = tokenizer, sizes
        self._end_ids = end_token_ids(model)
        embedding: Any = model.get_input_embeddings()
        self._vocabulary: int = embedding.num_embeddings

    def make(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int | Sequence[int],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        ids: Iterator[int],
        *,
        stream: bool,
    ) -> list[EngineRequest]:
        """Return a request a prompt, in order.

        Args:
            prompts: Texts or token ids.
            max_new_tokens: For all, or one a prompt.
            sampling: For all, or one a prompt; None: greedy.
            ids: Gives the requests' ids.
            stream: Whether the requests give text as it comes.

        Raises:
            ConfigError: The arguments do not fit together.
            RequestRefused: Prompts that can never be served; every one with every reason.
        """
        prompts = several(prompts, "prompts")
        limits = [as_int(one) for one in _one_each(max_new_tokens, Integral, len(prompts), "max_new_tokens")]
        wanted = SamplingParams() if sampling is None else sampling
        params = _one_each(wanted, SamplingParams, len(prompts), "sampling")
        problems: dict[int, tuple[str, ...]] = {}
        read: list[tuple[tuple[int, ...], EncoderInput | None]] = []
        for place, (prompt, most, one) in enumerate(zip(prompts, limits, params)):
            tokens, encoder, faults = self._read(prompt)
            faults += self._faults(tokens, most, one) if not faults else []
            if faults:
                problems[place] = tuple(faults)
            read.append((tokens, encoder))
        if problems:
            raise RequestRefused(problems, remedy="shorten or correct these prompts, or give the engine larger limits")
        return [
            EngineRequest(
                request_id=next(ids),
                prompt=tokens,
                max_new_tokens=most,
                params=one,
                end_ids=frozenset(one.stop_token_ids) | (frozenset() if one.ignore_eos else self._end_ids),
                max_len=self._sizes.max_context_len,
                text=self._text_stream(one) if stream or one.stop else None,
                encoder=encoder,
            )
            for (tokens, encoder), most, one in zip(read, limits, params)
        ]

    def _text_stream(self, params: SamplingParams) -> TextStream | None:
        return None if self._tokenizer is None else TextStream(self._tokenizer, params.stop)

    def _read(self, prompt: Prompt) -> tuple[tuple[int, ...], EncoderInput | None, list[str]]:
        """Return the tokens before the first new one, what an encoder reads, and what is wrong with either."""
        tokens, faults = self.encode(prompt)
        return tokens, None, faults

    def encode(self, prompt: Any) -> tuple[tuple[int, ...], list[str]]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                return (), ["it is a text, and this engine has no tokenizer; allowed: token ids"]
            if fault := text_fault(prompt):
                return (), [fault]
            return tuple(self._tokenizer.encode(prompt)), []
        if isinstance(prompt, (bytes, bytearray)):  # Their items are numbers, and would pass for token ids.
            return (), [f"it is {type(prompt).__name__}; allowed: a text, or a list of token ids"]
        try:
            return tuple(as_int(token) for token in prompt), []
        except TypeError:
            return (), [f"it is {type(prompt).__name__}; allowed: a text, or a list of token ids"]

    def _faults(self, tokens: tuple[int, ...], max_new_tokens: int, params: SamplingParams) -> list[str]:
        sizes, faults = self._sizes, self.token_faults(tokens)
        if max_new_tokens < 1:
            faults.append(f"max_new_tokens is {max_new_tokens}; allowed: at least 1")
        if len(tokens) >= sizes.max_context_len:
            faults.append(
                f"{len(tokens)} tokens fill the context of {sizes.max_context_len}; allowed: at most "
                f"{sizes.max_context_len - 1}, so that one can follow"
            )
        capacity = sizes.num_pages * sizes.page_size
        if len(tokens) + (max_new_tokens > 1) > capacity:
            faults.append(
                f"{len(tokens)} tokens and those to come need more than the KV pool's {sizes.num_pages} pages of "
                f"{sizes.page_size}; allowed: at most {capacity - 1} tokens"
            )
        if params.stop and self._tokenizer is None:
            faults.append("it has stop strings, and this engine has no tokenizer; allowed: stop_token_ids")
        return faults

    def token_faults(self, tokens: tuple[int, ...]) -> list[str]:
        faults = [] if tokens else ["it has no tokens; allowed: at least one"]
        strange = [token for token in tokens if not 0 <= token < self._vocabulary]
        if strange:
            faults.append(f"token {strange[0]} is outside the vocabulary; allowed: 0 … {self._vocabulary - 1}")
        return faults


def text_fault(text: str) -> str:
    """Return what makes a text none that a tokenizer takes: half a character, as bytes that are no UTF-8 give."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} is {text[error.start]!r}, half a character; allowed: text of UTF-8"
    return ""


def end_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the tokens that end a completion: those of the generation config, else of the config."""
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset((ids,) if isinstance(ids, int) else ids)
    return frozenset()


def several(given: Any, name: str) -> list[Any]:
    """Return the prompts of an argument.

    Raises:
        ConfigError: It is one prompt, or none at all.
    """
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        kind = "one text" if isinstance(given, str) else type(given).__name__
        raise ConfigError(f"{name} is {kind}; allowed: a list of texts or of token-id lists", key=name)
    return list(given)


def _one_each(value: Any, kind: type, count: int, name: str) -> list[Any]:
    if isinstance(value, kind):
        return [value] * count
    several = isinstance(value, Iterable) and not isinstance(value, (str, Mapping))
    values = list(value) if several else [value]
    strange = [one for one in values if not isinstance(one, kind)]
    if strange:
        allowed = "a whole number" if kind is Integral else kind.__name__
        raise ConfigError(f"{name} is {strange[0]!r}; allowed: {allowed}, or one a prompt", key=name)
    if len(values) != count:
        raise ConfigError(
            f"{name} has {len(values)} values for {count} prompts; allowed: one, or one a prompt", key=name
        )
    return values
