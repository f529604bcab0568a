"""What ``attnplug generate`` prints on standard output: each prompt with its text, in order."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .results import Completion

__all__ = ["Printer"]


class Printer:
    """Prints prompts with their texts, in order; live, each text as far as it has come.

    Args:
        prompts: What was asked.
        live: Print while texts grow: the first unfinished one as it comes, later ones when their turn is there.
    """

    def __init__(self, prompts: list[str], *, live: bool) -> None:
        self.live = live
        self._prompts = prompts
        self._waiting = [""] * len(prompts)
        self._ended = [False] * len(prompts)
        self._turn = 0
        self._titled = False

    def push(self, index: int, text: str, *, ended: bool) -> None:
        """Take a part of a prompt's text."""
        self._waiting[index] += text
        self._ended[index] = self._ended[index] or ended
        while self.live and self._turn < len(self._prompts):
            self._title()
            print(self._waiting[self._turn], end="", flush=True)
            self._waiting[self._turn] = ""
            if not self._ended[self._turn]:
                return
            print()
            self._turn, self._titled = self._turn + 1, False

    def finish(self, completions: list[Completion]) -> None:
        """Print what was not printed live."""
        for one in completions[self._turn :]:
            self._title()
            print(one.text)
            self._turn, self._titled = self._turn + 1, False
        print()

    def _title(self) -> None:
        if self._titled:
            return
        title = f"[{self._turn + 1}/{len(self._prompts)}] {self._prompts[self._turn]}"
        print(f"\n\033[1;36m{title}\033[0m" if sys.stdout.isatty() else f"\n{title}")
        self._titled = True
