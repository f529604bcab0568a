"""The one place that reads installed metadata: one scan a process, cached, and what is derived from it.

The standard library's ``importlib.metadata`` has all that is used here since Python 3.10, the oldest Python served:
no backport is needed. (Importing the backport would also replace the finder of the whole process, which a library
should not do to an inference server.)
"""

from __future__ import annotations

import importlib
import importlib.metadata as importlib_metadata
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from .spec import CONTRACT

PREFIX = "attnplug."
SPECS = "attnplug.specs.v"
BACKENDS = "attnplug.backends.v"
SPECS_GROUP = f"{SPECS}{CONTRACT[0]}"
BACKENDS_GROUP = f"{BACKENDS}{CONTRACT[0]}"
PLUGINS_GROUP = "attnplug.plugins.v1"
COMMANDS_GROUP = "attnplug.commands.v1"
MODEL_SPECS_GROUP = "attnplug.model_specs.v1"


@dataclass(frozen=True, slots=True)
class Dist:
    """One installed distribution."""

    name: str
    version: str
    location: str
    """The folder on ``sys.path`` that its metadata lies in."""
    requires: tuple[str, ...] = ()
    shadowed: bool = field(default=False, compare=False)
    """Whether another copy of the same name comes first on ``sys.path``, so that Python never sees this one."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


class Announcement(NamedTuple):
    """One entry point of a group that belongs to attnplug."""

    group: str
    name: str
    entry_point: importlib_metadata.EntryPoint
    dist: Dist

    @property
    def sort_key(self) -> tuple[str, str, str, str]:
        return (self.group, self.name, canonical_name(self.dist.name), self.entry_point.value)


@dataclass(frozen=True, slots=True)
class Scan:
    """What one pass over the installed metadata found, in an order that does not depend on the file system."""

    announcements: tuple[Announcement, ...]
    copies: tuple[Dist, ...]
    """Every copy of every distribution that announces something; more than one of a name means a stale one."""
    faults: tuple[str, ...]
    """Metadata that cannot be read, in words."""
    num_dists: int
    seconds: float

    def group(self, name: str) -> tuple[Announcement, ...]:
        """Return the announcements of one group, sorted by name and distribution."""
        return tuple(a for a in self.announcements if a.group == name)

    @property
    def stale(self) -> tuple[Dist, ...]:
        """Copies that another copy of the same name hides."""
        return tuple(dist for dist in self.copies if dist.shadowed)


_cached: Scan | None = None


def scan(*, refresh: bool = False) -> Scan:
    """Return the process's scan of installed metadata, made at the first call.

    Args:
        refresh: Forget the earlier scan, and what Python cached about ``sys.path``, and look again.
    """
    global _cached
    if refresh:
        _cached = None
        importlib.invalidate_caches()
    if _cached is None:
        _cached = _scan()
    return _cached


def canonical_name(name: str) -> str:
    """Return a distribution's name as indexes compare it: lower case, runs of ``-_.`` as one dash."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_version(dist_name: str) -> str | None:
    """Return the version of an installed distribution, None where there is none."""
    try:
        return importlib_metadata.version(dist_name)
    except importlib_metadata.PackageNotFoundError:
        return None


def _scan() -> Scan:
    start = time.perf_counter()
    found: list[tuple[Dist, importlib_metadata.Distribution]] = []
    faults: list[str] = []
    num_dists = 0
    for raw in importlib_metadata.distributions():
        num_dists += 1
        # Reading this one small file is much cheaper than parsing each METADATA; most distributions end here.
        if PREFIX not in (raw.read_text("entry_points.txt") or ""):
            continue
        dist = _describe(raw)
        if dist is None:
            faults.append(f"a distribution in {raw.locate_file('')} has entry points of attnplug but no readable name")
        elif all(dist != other for other, _ in found):
            found.append((dist, raw))
    copies: list[Dist] = []
    for name in sorted({canonical_name(dist.name) for dist, _ in found}):
        copies.extend(_copies(name))
    seen = {(canonical_name(dist.name), dist.version, dist.location) for dist in copies if not dist.shadowed}
    announcements = [
        Announcement(entry_point.group, entry_point.name, entry_point, dist)
        for dist, raw in found
        if (canonical_name(dist.name), dist.version, dist.location) in seen
        for entry_point in raw.entry_points
        if entry_point.group.startswith(PREFIX)
    ]
    announcements.sort(key=lambda a: a.sort_key)
    return Scan(tuple(announcements), tuple(copies), tuple(faults), num_dists, time.perf_counter() - start)


def _describe(raw: importlib_metadata.Distribution, *, shadowed: bool = False) -> Dist | None:
    name = raw.metadata["Name"] if raw.read_text("METADATA") or raw.read_text("PKG-INFO") else None
    if not name:
        return None
    return Dist(name, raw.version or "0", str(raw.locate_file("")), tuple(_texts(raw.requires)), shadowed)


def _copies(name: str) -> list[Dist]:
    """Return every copy of a distribution on ``sys.path``; Python uses the first, so the others are shadowed."""
    copies: list[Dist] = []
    for raw in importlib_metadata.distributions(name=name):
        dist = _describe(raw, shadowed=bool(copies))
        if dist is not None and dist not in copies:
            copies.append(dist)
    return copies


def _texts(values: Iterable[str] | None) -> Iterable[str]:
    return () if values is None else (str(value) for value in values)
