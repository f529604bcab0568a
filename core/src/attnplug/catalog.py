"""What is installed: every announced backend with its state and the reasons for it, without importing any kernel."""

from __future__ import annotations

import contextlib
import sys
import traceback
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace

from . import _metadata, known
from ._kernel import EXTRA, check_kernel
from ._metadata import BACKENDS, SPECS, Announcement, Dist, Scan, canonical_name
from .entry import Entry, State
from .errors import (
    AttnplugError,
    BackendConflict,
    BackendIncompatible,
    BackendLoadError,
    BackendRejected,
    Reason,
    UnknownBackend,
)
from .spec import CONTRACT, CONTRACT_FEATURES, BackendSpec

__all__ = ["Catalog", "Entry", "State"]


class Catalog:
    """The backends that installed metadata announces.

    A spec is read when its row is first asked for; asking for one name reads one spec. A row is identified by its name
    and distribution; a name is announced twice only in a CONFLICT, or where ``[provider]`` settled one.

    Args:
        scan: Installed metadata; the process's cached scan by default.
        block: Names of backends, or of distributions, that may not be used.
        allow: Where given, only these names of backends or distributions may be used.
        providers: For a name that several distributions announce, the one that is meant.
    """

    def __init__(
        self,
        scan: Scan | None = None,
        *,
        block: Iterable[str] = (),
        allow: Iterable[str] | None = None,
        providers: Mapping[str, str] | None = None,
    ) -> None:
        self._block, self._allow = tuple(block), None if allow is None else tuple(allow)
        self._providers = dict(providers or {})
        self.scan = _metadata.scan() if scan is None else scan
        self._rows: dict[tuple[str, str], Entry] = {}
        self._announce()

    def refresh(self) -> None:
        """Look at installed metadata again, and forget what was read and loaded."""
        self.scan = _metadata.scan(refresh=True)
        self._rows.clear()
        self._announce()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every row, sorted by name and distribution, with its spec read."""
        return tuple(self._described(key) for key in sorted(self._rows))

    @property
    def names(self) -> tuple[str, ...]:
        """Every announced name, sorted; no spec is read."""
        return tuple(sorted({name for name, _ in self._rows}))

    def rows(self, name: str) -> tuple[Entry, ...]:
        """Return every row of a name: several where distributions compete for it."""
        return tuple(self._described(key) for key in sorted(self._rows) if key[0] == name)

    def get(self, name: str) -> Entry:
        """Return the row that a name or an old alias means, in whatever state it is.

        Raises:
            UnknownBackend: Nothing announces it.
            BackendConflict: Several distributions announce it.
        """
        rows = self.rows(name)
        if not rows:
            return self.get(self._forward(name))
        if any(row.state is State.CONFLICT for row in rows):
            dists = [str(row.dist) for row in rows if row.state is State.CONFLICT]
            raise BackendConflict(
                f"backend {name!r} is announced by {len(dists)} distributions: {', '.join(dists)}",
                remedy=f"name one in the configuration, [provider] {name} = {rows[0].distribution!r}, or uninstall one",
            )
        # A row that the provider setting or another major keeps out yields to one that may be used.
        return min(rows, key=lambda row: (row.state in (State.BLOCKED, State.INCOMPATIBLE), row.distribution))

    def require(self, name: str) -> Entry:
        """Return the row that a name means, usable for a request.

        Raises:
            AttnplugError: The member of the family that says why it is not usable.
        """
        entry = self.get(name)
        if not entry.state.usable:
            raise unusable(entry)
        return entry

    def mark(self, entry: Entry, state: State, *reasons: Reason, error: str = "", traceback: str = "") -> Entry:
        """Record that a row has come to another state, and return the new row."""
        key = (entry.name, canonical_name(entry.distribution))
        moved = self._rows[key].moved(state, *reasons, error=error, traceback=traceback)
        self._rows[key] = moved
        return moved

    def _announce(self) -> None:
        """Make a FOUND row of each name and distribution, and settle what metadata alone can settle."""
        found: dict[tuple[str, str], dict[int, list[Announcement]]] = {}
        for announcement in self.scan.announcements:
            major = _major(announcement.group)
            if major is not None:
                key = (announcement.name, canonical_name(announcement.dist.name))
                found.setdefault(key, {}).setdefault(major, []).append(announcement)
        for key, majors in found.items():
            self._rows[key] = _row(key[0], majors)
        for name in self.names:
            self._settle(name)

    def _settle(self, name: str) -> None:
        rivals = []
        for key in [key for key in sorted(self._rows) if key[0] == name]:
            entry = self._rows[key]
            if reason := self._blocked(entry):
                self._rows[key] = entry.moved(State.BLOCKED, reason)
            elif entry.state is not State.INCOMPATIBLE:
                rivals.append(key)
        provider = canonical_name(self._providers.get(name, ""))
        if len(rivals) < 2 and not provider:
            return
        dists = ", ".join(str(self._rows[key].dist) for key in rivals)
        for key in rivals:
            if len(rivals) == 1 and key[1] != provider:
                # Who was named is not here; another of the name, unasked for, would serve without a word.
                reason = Reason("provider", self._providers[name], f"installed: {dists}")
                self._rows[key] = self._rows[key].moved(State.BLOCKED, reason)
                continue
            if provider not in [rival for _, rival in rivals]:
                reason = Reason("provider", self._providers.get(name, "unset"), f"one of {dists}")
                self._rows[key] = self._rows[key].moved(State.CONFLICT, reason)
            elif key[1] != provider:
                reason = Reason("provider", self._rows[key].distribution, f"[provider] {name} = {provider!r}")
                self._rows[key] = self._rows[key].moved(State.BLOCKED, reason)

    def _blocked(self, entry: Entry) -> Reason | None:
        def named(names: Iterable[str]) -> bool:
            return any(n == entry.name or canonical_name(n) == canonical_name(entry.distribution) for n in names)

        if named(self._block):
            return Reason("plugins.block", entry.name, f"not in {list(self._block)}")
        if self._allow is not None and not named(self._allow):
            return Reason("plugins.allow", entry.name, f"one of {list(self._allow)}")
        return None

    def _described(self, key: tuple[str, str]) -> Entry:
        if self._rows[key].state is State.FOUND:
            self._rows[key] = describe(self._rows[key])
        return self._rows[key]

    def _forward(self, name: str) -> str:
        """Return the name that an alias stands for, with a warning."""
        owners = sorted({row.name for row in self.entries if row.spec and name in row.spec.aliases})
        if len(owners) > 1:
            raise BackendConflict(
                f"{name!r} is an old name of {len(owners)} backends: {', '.join(owners)}",
                remedy="write the present name of the one that is meant",
            )
        if not owners:
            raise unknown(name, self)
        message = f"backend name {name!r} is deprecated: write {owners[0]!r}"
        warnings.warn(message, DeprecationWarning, stacklevel=4)
        return owners[0]


def describe(entry: Entry) -> Entry:
    """Read a FOUND row's spec and return the row in the state that the spec, by itself, puts it in."""
    assert entry.spec_entry_point is not None, "a FOUND row has both entry points"
    try:
        # A spec that prints would spoil a listing that another program reads.
        with contextlib.redirect_stdout(sys.stderr):
            spec = entry.spec_entry_point.load()
        if not isinstance(spec, BackendSpec):
            reason = Reason("spec", f"a BackendSpec at {entry.spec_entry_point.value}", type(spec).__name__)
            return entry.moved(State.BROKEN_SPEC, reason)
        major, minor = spec.contract
        faults = spec.validate()
    # Foreign code, and any failure of it must stay in its own row: even sys.exit() in a spec may not end a listing.
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}"
        reason = Reason("spec", f"import {entry.spec_entry_point.value}", text)
        return entry.moved(State.BROKEN_SPEC, reason, error=text, traceback=traceback.format_exc())
    entry = replace(entry, spec=spec)
    if spec.name != entry.name:
        faults.insert(0, f"spec.name is {spec.name!r} but its entry point is named {entry.name!r}")
    if faults:
        return entry.moved(State.BROKEN_SPEC, *(Reason("spec", "a valid declaration", fault) for fault in faults))
    reasons = []
    if major != CONTRACT[0] or minor > CONTRACT[1]:
        reasons.append(Reason("contract", f"{major}.{minor}", f"{CONTRACT[0]}.0 … {CONTRACT[0]}.{CONTRACT[1]}"))
    if lacking := sorted(map(str, spec.needs - CONTRACT_FEATURES)):
        reasons.append(Reason("needs", ", ".join(lacking), ", ".join(sorted(CONTRACT_FEATURES))))
    if reasons:
        return entry.moved(State.INCOMPATIBLE, *reasons)
    check = check_kernel(spec.kernel_modules, entry.dist)
    entry = replace(entry, notes=check.notes)
    return entry.moved(State.MISSING_KERNEL if check.reasons else State.DESCRIBED, *check.reasons)


def unknown(name: str, catalog: Catalog) -> UnknownBackend:
    """Return the error for a name that nothing announces: nearest names, what is installed, the pip command."""
    command = known.install_command(name)
    hint = known.did_you_mean(name, [*catalog.names, *known.DISTRIBUTIONS])
    if not command and (near := known.nearest(name, [*catalog.names, *known.DISTRIBUTIONS])):
        command = "" if near[0] in catalog.names else known.install_command(near[0])
    installed = ", ".join(catalog.names) or "none"
    message = f"no installed distribution announces a backend {name!r}; installed: {installed}"
    return UnknownBackend(
        "; ".join(part for part in (message, "" if name in known.DISTRIBUTIONS else hint) if part),
        remedy=command or "write the name of an installed backend: `attnplug list` shows them",
    )


def unusable(entry: Entry) -> AttnplugError:
    """Return the error for naming a row whose state rules it out."""
    head = f"backend {entry.name!r} ({entry.dist}) is {entry.state.value}"
    lines = "".join(f"\n  {reason}" for reason in entry.reasons)
    if entry.state is State.INCOMPATIBLE:
        return BackendIncompatible(
            head + lines, remedy=f"install a release of {entry.distribution} made for contract {CONTRACT[0]}.x"
        )
    if entry.state is State.MISSING_KERNEL:
        return BackendRejected(
            head, reasons={entry.name: entry.reasons}, remedy=f"pip install '{entry.distribution}[{EXTRA}]'"
        )
    if entry.state is State.BLOCKED:
        remedy = "change the [plugins] or [provider] table of the configuration"
        return BackendRejected(head, reasons={entry.name: entry.reasons}, remedy=remedy)
    if entry.state is State.CONFLICT:
        return BackendConflict(head + lines, remedy=f"name one: [provider] {entry.name} = {entry.distribution!r}")
    remedy = f"`attnplug doctor` shows the traceback; repair, upgrade or uninstall {entry.distribution}"
    return BackendLoadError(head + lines, remedy=remedy)


def _major(group: str) -> int | None:
    for prefix in (SPECS, BACKENDS):
        if group.startswith(prefix) and group[len(prefix) :].isdecimal():
            return int(group[len(prefix) :])
    return None


def _row(name: str, majors: Mapping[int, list[Announcement]]) -> Entry:
    """Make a distribution's row of a name from the majors it announces it for."""
    ours = majors.get(CONTRACT[0])
    if ours is None:
        # Told from the groups' names: code written for another contract may not even import here.
        dist: Dist = next(iter(majors.values()))[0].dist
        asked = ", ".join(f"v{major}" for major in sorted(majors))
        return Entry(
            name, State.INCOMPATIBLE, dist, max(majors), reasons=(Reason("contract", asked, f"v{CONTRACT[0]}"),)
        )
    specs = [a.entry_point for a in ours if a.group.startswith(SPECS)]
    backends = [a.entry_point for a in ours if a.group.startswith(BACKENDS)]
    reasons = [
        Reason("entry_points", f"one {name!r} in {prefix}{CONTRACT[0]}", f"{len(found)} announced")
        for prefix, found in ((SPECS, specs), (BACKENDS, backends))
        if len(found) != 1
    ]
    return Entry(
        name,
        State.BROKEN_SPEC if reasons else State.FOUND,
        ours[0].dist,
        CONTRACT[0],
        spec_entry_point=specs[0] if specs else None,
        backend_entry_point=backends[0] if backends else None,
        reasons=tuple(reasons),
    )
