"""How requests are put together into tiles: by what each is alone, so that a result does not depend on company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SHORT_KEYS = 256
"""Up to so many keys a request's columns are padded to a multiple of BUCKET, so that others can join."""
SHORT_QUERIES = 8
"""Up to so many queries a request may be padded: with more, its own call costs little beside its work."""
BUCKET = 32


@dataclass(frozen=True, slots=True)
class Lane:
    """One request's part of a step, by host numbers."""

    index: int
    """Its place in the batch."""
    row: int
    """Its first query row."""
    t: int
    n: int
    """Key columns to read, more than 0."""
    shift: int
    """Column of its first query."""
    start: int
    """Position of column 0."""
    offset: int
    """Where its entries start in the packed stream of slots."""

    @property
    def is_short(self) -> bool:
        """Whether its columns are padded to a bucket."""
        return self.n <= SHORT_KEYS and self.t <= SHORT_QUERIES

    @property
    def columns(self) -> int:
        """Key columns of its tile."""
        return -(-self.n // BUCKET) * BUCKET if self.is_short else self.n


def group_lanes(lanes: Sequence[Lane], page_size: int, max_tokens: int) -> list[list[Lane]]:
    """Return lanes that can share a call, in batch order; only a single lane has more than ``max_tokens`` columns."""
    groups: dict[tuple[int, ...], list[list[Lane]]] = {}
    for lane in lanes:
        key: tuple[int, ...] = (lane.t, lane.columns)
        if not lane.is_short:
            key = (*key, lane.shift, lane.start % page_size)
        parts = groups.setdefault(key, [[]])
        if parts[-1] and (len(parts[-1]) + 1) * lane.columns > max_tokens:
            parts.append([])
        parts[-1].append(lane)
    return [part for parts in groups.values() for part in parts]


def query_rows(group: Sequence[Lane], device: torch.device) -> slice | Tensor:
    """Return the query rows of a group: a slice where they follow each other."""
    t, first = group[0].t, group[0].row
    if all(lane.row == first + i * t for i, lane in enumerate(group)):
        return slice(first, first + len(group) * t)
    starts = torch.tensor([lane.row for lane in group], dtype=torch.int64)
    return (starts[:, None] + torch.arange(t)).flatten().to(device, non_blocking=True)


def find_runs(slots: Tensor, lanes: Sequence[Lane]) -> dict[int, int]:
    """Return the first slot of each lane whose slots are one run, by its place in the batch. Reads a host tensor."""
    if not lanes:
        return {}
    ends = torch.tensor([[lane.offset, lane.offset + lane.n - 1] for lane in lanes])
    runs = {}
    for lane, (first, last) in zip(lanes, slots[ends].tolist(), strict=True):
        if last - first == lane.n - 1:
            mine = slots[lane.offset : lane.offset + lane.n]
            if bool((mine[1:] - mine[:-1] == 1).all()):
                runs[lane.index] = first
    return runs
