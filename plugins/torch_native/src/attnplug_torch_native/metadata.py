"""What a step's metadata is: tiles of requests that one call attends, made once a step for each way of reading."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from attnplug.modes import KVSpace

from .kernels.mask import Visibility
from .tree import TreeCells


class ReadKey(NamedTuple):
    """What layers must agree in to share tiles; heads, dims and caps do not matter to what is read."""

    space: KVSpace | None
    """Where keys are read; None: from the rows of the batch itself."""
    window: int
    causal: bool


@dataclass(frozen=True, slots=True)
class Tile:
    """``count`` requests with ``t`` queries and ``n`` key columns each."""

    rows: slice | Tensor
    """Query rows of the batch, request by request: a slice, or [count · t] int64, device."""
    count: int
    t: int
    n: int
    visibility: Visibility
    slots: Tensor | None = None
    """[count · n] int64, device: where each column is read; None: one run, or rows of the batch."""
    run: int = -1
    """First slot, or first key row, of a read that is one run."""
    pages: Tensor | None = None
    """[count · pages] int64, device: the pages that hold the columns, where whole pages are gathered."""
    page_offset: int = 0
    """Column 0's place in its first page."""
    mask: Tensor | None = None
    """[count or 1, t, n] bool, device: made once where it is small; replaces ``visibility`` where it is there."""
    may_see_nothing: bool = False
    """Whether a query may be left without a key, which the fused kernel does not promise zeros for."""


@dataclass(slots=True)
class StepMetadata:
    """One step, compiled."""

    query_lens_cpu: tuple[int, ...]
    """[B]; 0 for requests of padding, whose rows are not computed."""
    query_starts_cpu: tuple[int, ...]
    """[B]: each request's first query row."""
    tiles: dict[ReadKey, tuple[Tile, ...]] = field(default_factory=dict)
    """Reads of a pool, and of the batch's own rows."""
    chunks: dict[tuple[int, ...], tuple[Tile, ...]] = field(default_factory=dict)
    """Reads of gathered prefix chunks, by the chunk's lengths."""
    trees: list[TreeCells] = field(default_factory=list)
    """Tree masks that tiles were made from, to be read again when drafting has filled them."""


def select_rows(x: Tensor, rows: slice | Tensor) -> Tensor:
    """Return rows of a tensor, as a view where they are one slice."""
    return x[rows] if isinstance(rows, slice) else torch.index_select(x, 0, rows)
