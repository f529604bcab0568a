"""Choose a backend for each role: rank by specs alone, then probe the winners, and keep every reason."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from . import known
from .catalog import Catalog, unknown, unusable
from .decision import Candidate, Choice, Decision, Rejection
from .device import DeviceFacts, describe_device
from .entry import Entry, State
from .errors import AttnplugError, BackendConflict, BackendLoadError, BackendRejected, Reason
from .model_spec import ModelSpec
from .request import Deployment, Request, Role, Speculation, make_requests
from .spec import CONTRACT, BackendSpec, Kind
from .verdict import verdict

if TYPE_CHECKING:
    from .config import AttentionConfig

__all__ = ["Candidate", "Choice", "Decision", "Deployment", "Prober", "Request", "Role", "Speculation", "resolve"]

AUTO = "auto"
_COMMON_PAGE_SIZES = (64, 16, 32, 128, 1, 256)


class Prober(Protocol):
    """What selection asks of the plugin manager: the only part of it that runs a plugin's code."""

    def probe(self, name: str, device: DeviceFacts) -> list[str]:
        """Return run-time reasons against a backend; raises BackendLoadError where its plugin does not load."""
        ...

    def preferred(self, request: Request) -> Sequence[str]:
        """Return a platform's own order of names for a request, best first; empty where it has none."""
        ...


class _Wish(NamedTuple):
    """What the configuration asks for a role, and the rung that asked."""

    names: tuple[str, ...]
    rung: str
    source: str

    @property
    def is_exact(self) -> bool:
        return len(self.names) == 1 and self.names[0] != AUTO


@dataclass(slots=True)
class _Ranking:
    """A role's candidates, best first, and why the others are none."""

    request: Request
    wish: _Wish
    fits: list[Entry] = field(default_factory=list)
    rejected: dict[str, list[Reason]] = field(default_factory=dict)

    def reject(self, entry: Entry, *reasons: Reason) -> None:
        self.fits = [one for one in self.fits if one.name != entry.name]
        self.rejected.setdefault(entry.name, []).extend(reasons)


def resolve(
    model: ModelSpec | None = None,
    config: AttentionConfig | None = None,
    device: str | DeviceFacts | None = None,
    catalog: Catalog | None = None,
    *,
    deployment: Deployment | None = None,
    prober: Prober | None = None,
) -> Decision:
    """Choose a backend for each role of a deployment.

    Args:
        model: What the model asks, layer by layer; None: only what does not depend on a model is checked.
        config: Names, lists or "auto" for each role; everything "auto" by default.
        device: Where it will run; the best device of this machine by default.
        catalog: What is installed; the environment's, under the configuration's block, allow and provider, by default.
        deployment: Speculation, modes, graphs and overlap that the engine will use.
        prober: Loads winners and asks them for run-time reasons; a ``BackendManager`` by default.

    Raises:
        UnknownBackend: A name that nothing announces.
        BackendConflict: A name that several distributions announce.
        BackendRejected: For some role nothing that was asked for fits; holds every reason, and what would fit.
        BackendLoadError: The one backend asked for fails to load.
    """
    from .config import AttentionConfig

    config = config or AttentionConfig()
    catalog = config.catalog() if catalog is None else catalog
    facts = describe_device(device)
    deployment = deployment or Deployment()
    if prober is None:
        from .manager import BackendManager

        prober = BackendManager(catalog, config)
    requests = make_requests(model, config, facts, deployment)
    rankings = [_rank(request, _wish(request.role, config), catalog, prober.preferred(request)) for request in requests]
    _require_some(rankings, catalog)
    while True:
        combination = _combine(rankings, catalog)
        failed = _probe(combination, rankings, prober)
        if not failed:
            break
        _require_some(rankings, catalog)
    return _decide(combination, rankings, config, catalog, facts, model)


def rank(request: Request, names: Sequence[str], catalog: Catalog, preferred: Sequence[str] = ()) -> list[Entry]:
    """Return the backends that fit a request, best first, told from specs alone.

    Args:
        request: What one role asks.
        names: Names in order of preference; "auto" stands for every other one.
        catalog: What is installed.
        preferred: A platform's order among those that "auto" stands for.
    """
    return _rank(request, _Wish(tuple(names), "code", ""), catalog, preferred).fits


def _rank(request: Request, wish: _Wish, catalog: Catalog, preferred: Sequence[str]) -> _Ranking:
    ranking = _Ranking(request, wish)
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


def _entries(name: str, wish: _Wish, catalog: Catalog, ranking: _Ranking) -> Iterable[Entry]:
    """Return the rows that one asked name stands for."""
    if name == AUTO:
        listed = {one for one in wish.names if one != AUTO}
        return [entry for entry in catalog.entries if entry.name not in listed]
    if wish.is_exact:
        return [catalog.require(name)]
    if name not in catalog.names and name in known.DISTRIBUTIONS:
        # A list is written for several machines: one that is merely not installed here gives way, a typo does not.
        hint = known.install_command(name)
        ranking.rejected[name] = [Reason("installed", f"a distribution announcing {name}", f"none; {hint}")]
        return []
    return [catalog.get(name)]


def _auto_key(spec: BackendSpec, request: Request, preferred: Sequence[str]) -> tuple[object, ...]:
    order = {name: place for place, name in reversed(list(enumerate(preferred)))}
    waits_for_host = request.overlap and spec.needs_cpu_seq_lens
    return (order.get(spec.name, len(preferred)), spec.experimental, -spec.priority, waits_for_host, spec.name)


def _wish(role: Role, config: AttentionConfig) -> _Wish:
    for key in (role.key, role.key.replace("draft.", "")):
        names = config.names(key)
        if names is not None:
            rung = config.rung(key)
            return _Wish(names, rung.name, rung.source)
    raise AssertionError(f"role {role.value} has no configuration key")


def _require_some(rankings: Sequence[_Ranking], catalog: Catalog) -> None:
    """Raise with every reason of every role that nothing fits."""
    empty = [ranking for ranking in rankings if not ranking.fits]
    if not empty:
        return
    reasons: dict[str, dict[Reason, None]] = {}
    lines, remedies = [], []
    for ranking in empty:
        role = ranking.request.role
        asked = ", ".join(ranking.wish.names)
        source = f" ({ranking.wish.source})" if ranking.wish.source else ""
        lines.append(f"no backend fits {role.value}: asked for {asked} by {ranking.wish.rung}{source}")
        for name, rows in ranking.rejected.items():
            reasons.setdefault(name, {}).update(dict.fromkeys(rows))
        others = [entry.name for entry in rank(ranking.request, (AUTO,), catalog) if entry.name not in ranking.rejected]
        remedies.append(
            f"{role.value} fits {', '.join(others)}: choose one, or 'auto'"
            if others
            else f"{role.value}: no installed "
            "backend fits; change what is asked, or install another backend (attnplug list shows what is here)"
        )
    raise BackendRejected(
        "; ".join(lines),
        reasons={name: tuple(rows) for name, rows in reasons.items()},
        remedy="; ".join(dict.fromkeys(remedies)),
    )


def _combine(rankings: Sequence[_Ranking], catalog: Catalog) -> list[Entry]:
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


def _clash(rankings: Sequence[_Ranking], entries: Sequence[Entry]) -> list[Reason]:
    """Return why some backends cannot serve their roles together."""
    reasons = []
    if _page_size(rankings, entries) is None and any(ranking.request.role is not Role.LINEAR for ranking in rankings):
        accepted = "; ".join(f"{entry.name}: {entry.spec.page_sizes}" for entry in entries if entry.spec)
        reasons.append(Reason("pair.page_sizes", "one page size for all roles", accepted))
    for pool, layouts in _layouts(rankings, entries).items():
        if not layouts:
            accepted = "; ".join(
                f"{entry.name}: {', '.join(sorted(entry.spec.kv_layouts))}" for entry in entries if entry.spec
            )
            reasons.append(Reason("pair.kv_layouts", f"one layout of the {pool} pool", accepted))
    return reasons


def _page_size(rankings: Sequence[_Ranking], entries: Sequence[Entry]) -> int | None:
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


def _layouts(rankings: Sequence[_Ranking], entries: Sequence[Entry]) -> dict[str, frozenset[str]]:
    common: dict[str, frozenset[str]] = {}
    for ranking, entry in zip(rankings, entries):
        pool = ranking.request.role.pool
        if entry.spec is not None and ranking.request.role is not Role.LINEAR:
            common[pool] = common.get(pool, entry.spec.kv_layouts) & entry.spec.kv_layouts
    return common


def _probe(entries: Sequence[Entry], rankings: Sequence[_Ranking], prober: Prober) -> bool:
    """Probe a combination; put each failure on record and return whether there was one."""
    failed = False
    for name in dict.fromkeys(entry.name for entry in entries):
        users = [r for r, entry in zip(rankings, entries) if entry.name == name]
        entry = next(entry for entry in entries if entry.name == name)
        try:
            reasons = [
                Reason("probe", "a usable device and library", text)
                for text in prober.probe(name, users[0].request.device)
            ]
        except BackendLoadError as error:
            if any(ranking.wish.is_exact for ranking in users):
                raise
            reasons = [Reason("load", f"import {entry.dist}", error.message)]
        if reasons:
            failed = True
            # The facts are the device's and the library's, so they hold for every role that would try it.
            for ranking in rankings:
                if any(one.name == name for one in ranking.fits):
                    ranking.reject(entry, *reasons)
    return failed


def _decide(
    entries: Sequence[Entry],
    rankings: Sequence[_Ranking],
    config: AttentionConfig,
    catalog: Catalog,
    facts: DeviceFacts,
    model: ModelSpec | None,
) -> Decision:
    page_size = _page_size(rankings, entries)
    layouts = {pool: _preferred_layout(common) for pool, common in _layouts(rankings, entries).items()}
    attention = config.attention
    choices = []
    for ranking, entry in zip(rankings, entries):
        alternatives = _alternatives(ranking, entry, attention.fallback, catalog, page_size, layouts)
        wish = ranking.wish
        choices.append(
            Choice(ranking.request.role, _candidate(entry), wish.names, wish.rung, wish.source, tuple(alternatives))
        )
        if entry.state is State.DESCRIBED:
            catalog.mark(entry, State.SELECTED)
    pooled = [r.request for r in rankings if r.request.role is not Role.LINEAR]
    return Decision(
        choices=tuple(choices),
        rejections=tuple(
            Rejection(ranking.request.role, name, tuple(reasons))
            for ranking in rankings
            for name, reasons in sorted(ranking.rejected.items())
        ),
        page_size=page_size,
        kv_dtype=pooled[0].kv_dtype if pooled else None,
        kv_layouts=layouts,
        device=str(facts),
        model=model.name if model else "",
        fallback=attention.fallback,
        graphs=attention.graphs,
        speculative_attention_mode=attention.speculative_attention_mode,
        contract=CONTRACT,
    )


def _alternatives(
    ranking: _Ranking,
    chosen: Entry,
    fallback: str,
    catalog: Catalog,
    page_size: int | None,
    layouts: Mapping[str, str],
) -> list[Candidate]:
    """Return what may stand in for a backend that fails to load, under the pools that the decision fixed."""
    if fallback == "never":
        return []
    others = ranking.fits
    if fallback == "reference":
        others = [one for one in rank(ranking.request, (AUTO,), catalog) if one.name == known.REFERENCE]
    layout = layouts.get(ranking.request.role.pool)
    return [
        _candidate(one)
        for one in others
        if one.name != chosen.name
        and one.spec is not None
        and (page_size is None or page_size in one.spec.page_sizes)
        and (layout is None or layout in one.spec.kv_layouts)
    ]


def _candidate(entry: Entry) -> Candidate:
    return Candidate(entry.name, entry.distribution, entry.version)


def _preferred_layout(layouts: frozenset[str]) -> str:
    return "NHD" if "NHD" in layouts else min(layouts)
