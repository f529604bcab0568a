"""Rank the installed backends for one request, from specs alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from . import known
from .catalog import Catalog
from .entry import Entry
from .errors import Reason
from .request import Request
from .spec import BackendSpec
from .verdict import verdict

AUTO = "auto"


class Wish(NamedTuple):
    """What the configuration asks for a role, and the rung that asked."""

    names: tuple[str, ...]
    rung: str
    source: str

    @property
    def is_exact(self) -> bool:
        return len(self.names) == 1 and self.names[0] != AUTO


@dataclass(slots=True)
class Ranking:
    """A role's candidates, best first, and why the others are none."""

    request: Request
    wish: Wish
    fits: list[Entry] = field(default_factory=list)
    rejected: dict[str, list[Reason]] = field(default_factory=dict)

    def reject(self, entry: Entry, *reasons: Reason) -> None:
        self.fits = [one for one in self.fits if one.name != entry.name]
        self.rejected.setdefault(entry.name, []).extend(reasons)


def rank(request: Request, names: Sequence[str], catalog: Catalog, preferred: Sequence[str] = ()) -> list[Entry]:
    """Return the backends that fit a request, best first, told from specs alone.

    Args:
        request: What one role asks.
        names: Names in order of preference; "auto" stands for every other one.
        catalog: What is installed.
        preferred: A platform's order among those that "auto" stands for.
    """
    return rank_wish(request, Wish(tuple(names), "code", ""), catalog, preferred).fits


def rank_wish(request: Request, wish: Wish, catalog: Catalog, preferred: Sequence[str]) -> Ranking:
    ranking = Ranking(request, wish)
    keys: dict[str, tuple[object, ...]] = {}
    for place, name in enumerate(wish.names):
        for entry in _entries(name, wish, catalog, ranking):
            if entry.name in keys or entry.name in ranking.rejected:
                continue
            if not entry.state.usable or entry.spec is None:
                ranking.rejected[entry.name] = [Reason("state", "a usable backend", entry.state.value), *entry.reasons]
                continue
            reasons = verdict(entry.spec, request)
            if reasons:
                ranking.rejected[entry.name] = list(reasons)
                continue
            ranking.fits.append(entry)
            keys[entry.name] = (place, *_auto_key(entry.spec, request, preferred))
    ranking.fits.sort(key=lambda entry: keys[entry.name])
    return ranking


def _entries(name: str, wish: Wish, catalog: Catalog, ranking: Ranking) -> Iterable[Entry]:
    """Return the rows that one asked name stands for."""
    if name == AUTO:
        return [_best_row(catalog, one) for one in catalog.names if one not in wish.names]
    if wish.is_exact:
        return [catalog.require(name)]
    if name not in catalog.names and name in known.DISTRIBUTIONS:
        # A list is written for several machines: one that is merely not installed here gives way, a typo does not.
        hint = known.install_command(name)
        ranking.rejected[name] = [Reason("installed", f"a distribution announcing {name}", f"none; {hint}")]
        return []
    return [catalog.get(name)]


def _best_row(catalog: Catalog, name: str) -> Entry:
    """Return the usable row of a name, or one that says why there is none."""
    rows = catalog.rows(name)
    return next((row for row in rows if row.state.usable), rows[0])


def _auto_key(spec: BackendSpec, request: Request, preferred: Sequence[str]) -> tuple[object, ...]:
    order = {name: place for place, name in reversed(list(enumerate(preferred)))}
    waits_for_host = request.overlap and spec.needs_cpu_seq_lens
    return (order.get(spec.name, len(preferred)), spec.experimental, -spec.priority, waits_for_host, spec.name)
