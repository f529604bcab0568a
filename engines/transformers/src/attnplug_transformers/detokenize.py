"""From tokens to text as they come: never part of a character, never the beginning of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["TextStream", "Tokenizer", "decode"]

_UNDECIDED = "\ufffd"
"""What a tokenizer gives for bytes that do not (yet) make a character."""


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer; those of transformers have it."""

    def encode(self, text: str, /) -> list[int]:
        """Return the tokens of a text, special ones such as a begin token included."""
        ...

    def decode(self, token_ids: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        """Return the text of tokens."""
        ...


def decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the text of tokens, special ones left out."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=True)


class TextStream:
    """The text of one request, growing with its tokens.

    Args:
        tokenizer: Whose tokens come.
        stop: Texts at whose first appearance the text ends.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        # A token's text depends on the one before it, so each decoding starts one piece back: at _start, of which
        # the tokens up to _read are in the text already.
        self._start, self._read = 0, 0
        self._text, self._taken = "", 0

    @property
    def text(self) -> str:
        """All text that is certain so far."""
        return self._text

    def push(self, token: int) -> bool:
        """Take a token; return whether a stop string has appeared, before which the text then ends."""
        self._ids.append(token)
        return self._grow(final=False)

    def finish(self) -> None:
        """Take what is still undecided as it is: no token follows."""
        self._grow(final=True)

    def take(self, *, final: bool) -> str:
        """Return the text since the last call; unless it is final, without an ending that may become a stop string."""
        end = len(self._text) if final else len(self._text) - self._held_back()
        part = self._text[self._taken : end]
        self._taken = max(self._taken, end)
        return part

    def _grow(self, *, final: bool) -> bool:
        known = decode(self._tokenizer, self._ids[self._start : self._read])
        now = decode(self._tokenizer, self._ids[self._start :])
        if len(now) <= len(known) or (now.endswith(_UNDECIDED) and not final):
            return False
        scanned = len(self._text)
        self._text += now[len(known) :]
        self._start, self._read = self._read, len(self._ids)
        return self._cut(scanned)

    def _cut(self, scanned: int) -> bool:
        found = [self._text.find(stop, max(0, scanned - len(stop) + 1)) for stop in self._stop]
        first = min((at for at in found if at >= 0), default=-1)
        if first >= 0:
            self._text = self._text[:first]
        return first >= 0

    def _held_back(self) -> int:
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
