"""Choose one backend a role so that those that share a KV pool agree on its pages and layout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .entry import Entry
from .errors import BackendRejected, Reason
from .ranking import Ranking
from .request import Role

_COMMON_PAGE_SIZES = (64, 16, 32, 128, 1, 256)


def combine(rankings: Sequence[Ranking]) -> list[Entry]:
    """Return the best combination of one fitting backend a role that share page size and layouts.

    Best has the least sum of places; of equals, the one that favours the earlier role.
    """
    ranges = [range(len(ranking.fits)) for ranking in rankings]
    first: list[Reason] = []
    for places in sorted(itertools.product(*ranges), key=lambda places: (sum(places), places)):
        entries = [ranking.fits[place] for ranking, place in zip(rankings, places)]
        clash = _clash(rankings, entries)
        if not clash:
            return entries
        first = first or clash
    names = {entry.name: tuple(first) for entry in (ranking.fits[0] for ranking in rankings)}
    raise BackendRejected(
        "each role has backends that fit it, but no combination of them can share the KV pools",
        reasons=names,
        remedy="choose one backend for the roles of a pool, set [attention] page_size, or use 'auto'",
    )


def _clash(rankings: Sequence[Ranking], entries: Sequence[Entry]) -> list[Reason]:
    """Return why some backends cannot serve their roles together."""
    reasons = []
    pooled = any(ranking.request.role is not Role.LINEAR for ranking in rankings)
    if pooled and common_page_size(rankings, entries) is None:
        accepted = "; ".join(f"{entry.name}: {entry.spec.page_sizes}" for entry in entries if entry.spec)
        reasons.append(Reason("pair.page_sizes", "one page size for all roles", accepted))
    for pool, layouts in common_layouts(rankings, entries).items():
        if not layouts:
            accepted = "; ".join(
                f"{entry.name}: {', '.join(sorted(entry.spec.kv_layouts))}" for entry in entries if entry.spec
            )
            reasons.append(Reason("pair.kv_layouts", f"one layout of the {pool} pool", accepted))
    return reasons


def common_page_size(rankings: Sequence[Ranking], entries: Sequence[Entry]) -> int | None:
    """Return the page size asked for, or the best that every backend with a KV pool accepts."""
    pooled = [
        (r.request, e.spec.page_sizes)
        for r, e in zip(rankings, entries)
        if e.spec and r.request.role is not Role.LINEAR
    ]
    if not pooled:
        return None
    request = pooled[0][0]
    if request.page_size is not None:
        return request.page_size
    # Measured habits: CUDA kernels want 64 tokens a page, a CPU wastes less with 16.
    best = 64 if request.device.type == "cuda" else 16
    explicit = sorted({value for _, dims in pooled for value in dims.values})
    minima = sorted({dims.minimum for _, dims in pooled})
    for size in dict.fromkeys((best, *_COMMON_PAGE_SIZES, *explicit, *minima)):
        if all(size in dims for _, dims in pooled):
            return size
    return None


def common_layouts(rankings: Sequence[Ranking], entries: Sequence[Entry]) -> dict[str, frozenset[str]]:
    common: dict[str, frozenset[str]] = {}
    for ranking, entry in zip(rankings, entries):
        pool = ranking.request.role.pool
        if entry.spec is not None and ranking.request.role is not Role.LINEAR:
            common[pool] = common.get(pool, entry.spec.kv_layouts) & entry.spec.kv_layouts
    return common
