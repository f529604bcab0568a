"""What a launcher is given, beside queries and outputs: where keys are, and what attention over them means."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

LOG2E = 1.4426950408889634


class Table(NamedTuple):
    """Where each position's slot stands: entry ``ids[rows[b], j // entry]``."""

    ids: Tensor
    """[R, max_context / entry] int32, device."""
    rows: Tensor
    """[B] int64, device."""
    entry: int = 1
    """Tokens an entry: with 1 it is a slot, else a page."""
    page: int = 1
    """Tokens that surely lie one after another: the pool's page size."""


class Keys(NamedTuple):
    """A layer's keys and values in a pool, and how many positions each request may read."""

    k: Tensor
    """[slots, Hk, D]; MLA: [slots, 1, C + R]."""
    v: Tensor
    """[slots, Hk, Dv]; MLA: the first C columns of k."""
    table: Table
    lens: Tensor
    """[B] int64, device."""
    extra_len: int = 0
    """Added to every length: the draft window, which verify's lengths leave out."""


class Tree(NamedTuple):
    """The cells of a tree of drafts; see ``attnplug.masks.verify`` for the layouts."""

    cells: Tensor
    """[numel] bool, device."""
    start: Tensor
    """[B] int64, device: each request's first cell."""
    positions: Tensor
    """[T] int64, device."""
    full: bool
    """Whether cached positions have cells too."""


class Rules(NamedTuple):
    """A layer's semantics."""

    scaling: float
    cap: float = 0.0
    window: int = -1
    causal: bool = True
    sinks: Tensor | None = None
    """[Hq] float32, device."""
    k_scale: float = 1.0
    v_scale: float = 1.0
    tree: Tree | None = None


class Widths(NamedTuple):
    """Head widths, split where a kernel adds a rotated part to the scores."""

    d: int
    dv: int
    rope: int = 0
    """MLA: columns of a key row past its latent."""

    @property
    def latent(self) -> bool:
        """Whether values are the keys' own first columns."""
        return self.rope > 0


def next_power(n: int, least: int = 16) -> int:
    """Return the smallest power of 2 that is at least n and at least ``least``."""
    return max(least, 1 << max(n - 1, 0).bit_length())
