"""Choose a backend for each role: rank by specs alone, then probe the winners, and keep every reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from . import known
from .catalog import Catalog
from .decision import Candidate, Choice, Decision, Rejection
from .device import DeviceFacts, describe_device
from .entry import Entry, State
from .errors import BackendLoadError, BackendRejected, ConfigError, Reason
from .model_spec import ModelSpec
from .pairing import combine, common_layouts, common_page_size
from .ranking import AUTO, Ranking, Wish, rank, rank_wish
from .request import Deployment, Request, Role, Speculation, make_requests
from .spec import CONTRACT

if TYPE_CHECKING:
    from .config import AttentionConfig

__all__ = ["Candidate", "Choice", "Decision", "Deployment", "Prober", "Request", "Role", "Speculation", "resolve"]


class Prober(Protocol):
    """What selection asks of the plugin manager: the only part of it that runs a plugin's code."""

    def probe(self, name: str, device: DeviceFacts) -> list[str]:
        """Return run-time reasons against a backend; raises BackendLoadError where its plugin does not load."""
        ...

    def preferred(self, request: Request) -> Sequence[str]:
        """Return a platform's own order of names for a request, best first; empty where it has none."""
        ...


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
        ConfigError: A ``[backend.NAME]`` table is nearly a backend's name, and is none.
    """
    from .config import AttentionConfig

    config = config or AttentionConfig()
    catalog = config.catalog() if catalog is None else catalog
    facts = describe_device(device)
    deployment = deployment or Deployment()
    if config.plugins.strict:
        _require_sound(catalog)
    _refuse_misspelt_tables(config, catalog)
    if prober is None:
        from .manager import BackendManager

        prober = BackendManager(catalog, config)
    requests = make_requests(model, config, facts, deployment)
    rankings = [
        rank_wish(request, _wish(request.role, config), catalog, prober.preferred(request)) for request in requests
    ]
    _require_some(rankings, catalog)
    while True:
        combination = combine(rankings)
        failed = _probe(combination, rankings, prober, config.attention.fallback, catalog)
        if not failed:
            break
        _require_some(rankings, catalog)
    return _decide(combination, rankings, config, catalog, facts, model)


def _wish(role: Role, config: AttentionConfig) -> Wish:
    for key in (role.key, role.key.replace("draft.", "")):
        names = config.names(key)
        if names is not None:
            rung = config.rung(key)
            return Wish(names, rung.name, rung.source)
    raise AssertionError(f"role {role.value} has no configuration key")


def _refuse_misspelt_tables(config: AttentionConfig, catalog: Catalog) -> None:
    """Raise where a ``[backend.NAME]`` is nearly a name: its options would be read by nothing, and nobody told.

    A table of a backend that is merely not installed stays: one file may serve several machines.
    """
    known_names = {*catalog.names, *known.DISTRIBUTIONS}
    for name in config.backend:
        meant = known.did_you_mean(name, known_names) if name not in known_names else ""
        if meant:
            rung = config.rung(f"backend.{name}")
            raise ConfigError(
                f"[backend.{name}] configures no backend; {meant}",
                source=rung.source,
                key=f"backend.{name}",
                value=name,
                allowed=", ".join(sorted(known_names)),
                remedy="name the table as the backend is named: attnplug list",
            )


def _require_sound(catalog: Catalog) -> None:
    """Raise where any installed plugin is broken, in conflict or of another contract, chosen or not."""
    faulty = (State.BROKEN_SPEC, State.BROKEN_LOAD, State.CONFLICT, State.INCOMPATIBLE)
    faults = [
        f"{entry.name} ({entry.dist}) is {entry.state.value}: {'; '.join(map(str, entry.reasons))}"
        for entry in catalog.entries
        if entry.state in faulty
    ]
    if faults:
        raise BackendLoadError(
            "plugins.strict is set and these plugins are faulty:\n  " + "\n  ".join(faults),
            remedy="repair, block or uninstall them, or unset plugins.strict",
        )


def _require_some(rankings: Sequence[Ranking], catalog: Catalog) -> None:
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
        others = [one.name for one in rank(ranking.request, (AUTO,), catalog) if one.name not in ranking.rejected]
        if others:
            remedies.append(f"{role.value} can be served by {', '.join(others)}: choose one, or 'auto'")
        elif not catalog.names:
            remedies.append(f"no backend is installed at all: {known.install_command(known.REFERENCE)}")
        else:
            remedies.append("no installed backend fits: change what is asked, or install one that does")
    raise BackendRejected(
        "; ".join(lines),
        reasons={name: tuple(rows) for name, rows in reasons.items()},
        remedy="; ".join(dict.fromkeys(remedies)),
    )


def _probe(
    entries: Sequence[Entry], rankings: Sequence[Ranking], prober: Prober, fallback: str, catalog: Catalog
) -> bool:
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
            # "auto" asked for whatever works here. A backend that was named gives way only as far as fallback says.
            for ranking in users:
                if name in ranking.wish.names and not _give_way(ranking, name, fallback, catalog):
                    raise
            reasons = [Reason("load", f"import {entry.dist}", error.message)]
        if reasons:
            failed = True
            # The facts are the device's and the library's, so they hold for every role that would try it.
            for ranking in rankings:
                if any(one.name == name for one in ranking.fits):
                    ranking.reject(entry, *reasons)
    return failed


def _give_way(ranking: Ranking, name: str, fallback: str, catalog: Catalog) -> bool:
    """Return whether another may serve instead of a named backend that does not load; admits the reference."""
    if fallback == "reference" and all(one.name != known.REFERENCE for one in ranking.fits):
        ranking.fits += [one for one in rank(ranking.request, (AUTO,), catalog) if one.name == known.REFERENCE]
    return fallback != "never" and any(one.name != name for one in ranking.fits)


def _decide(
    entries: Sequence[Entry],
    rankings: Sequence[Ranking],
    config: AttentionConfig,
    catalog: Catalog,
    facts: DeviceFacts,
    model: ModelSpec | None,
) -> Decision:
    page_size = common_page_size(rankings, entries)
    layouts = {pool: _preferred_layout(common) for pool, common in common_layouts(rankings, entries).items()}
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
    ranking: Ranking,
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
