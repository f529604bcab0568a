"""Which keys a query sees, from positions alone: a mask is made only where some cell is hidden."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Visibility:
    """The rule of N requests with t queries and n key columns each. Column j of query i holds the key at offset j.

    A query i stands at column ``shift + i``: the rule is the same wherever the read starts.
    """

    causal: bool
    window: int
    """-1: none; w: columns shift+i-w … shift+i, and without causality up to shift+i+w."""
    shift: int | Tensor
    """Column of the first query: one number, or [N] int64, device."""
    key_lens: Tensor | None = None
    """[N] int64, device: columns from here on are padding; None: every column is a key."""

    def part(self, i: int) -> Visibility:
        """Return the rule of request i alone."""
        one = slice(i, i + 1)
        shift = self.shift if isinstance(self.shift, int) else self.shift[one]
        return replace(self, shift=shift, key_lens=None if self.key_lens is None else self.key_lens[one])

    def columns(self, lo: int, hi: int, n: int) -> tuple[int, int]:
        """Return the range of columns outside which queries ``lo … hi`` see nothing."""
        if not isinstance(self.shift, int):
            return 0, n
        first, stop = 0, n
        if self.window >= 0:
            first = max(0, self.shift + lo - self.window)
        if self.causal:
            stop = min(n, self.shift + hi)
        elif self.window >= 0:
            stop = min(n, self.shift + hi + self.window)
        return min(first, stop), stop

    def mask(self, rows: tuple[int, int], columns: tuple[int, int], device: torch.device) -> Tensor | None:
        """Return [N or 1, rows, columns] bool, True where visible; None where every cell is."""
        (lo, hi), (first, stop) = rows, columns
        if self._all_visible(lo, hi, first, stop):
            return None
        column = torch.arange(first, stop, device=device)
        cells: Tensor | None = None
        if self.causal or self.window >= 0:
            query = torch.arange(lo, hi, device=device)[:, None]
            at = query + self.shift if isinstance(self.shift, int) else query + self.shift[:, None, None]
            distance = at - column
            if self.causal:
                cells = distance >= 0
            if self.window >= 0:
                near = distance <= self.window
                cells = near if cells is None else cells & near
                if not self.causal:
                    cells &= distance >= -self.window
            if cells is not None and cells.dim() == 2:
                cells = cells[None]
        if self.key_lens is not None:
            inside = column < self.key_lens[:, None, None]
            cells = inside.expand(-1, hi - lo, -1) if cells is None else cells & inside
        return cells

    def _all_visible(self, lo: int, hi: int, first: int, stop: int) -> bool:
        if self.key_lens is not None:
            return False
        if not self.causal and self.window < 0:
            return True
        if not isinstance(self.shift, int):
            return False
        if self.causal and stop - 1 > self.shift + lo:
            return False
        if self.window >= 0:
            after_left_edge = first >= self.shift + hi - 1 - self.window
            return after_left_edge and (self.causal or stop - 1 <= self.shift + lo + self.window)
        return True
