"""Whether a backend's kernel library is installed and in range, told without importing it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from typing import NamedTuple

from ._metadata import Dist, installed_version
from .errors import Reason

EXTRA = "kernel"
"""The extra of a plugin's distribution that holds the kernel library's version range."""


class KernelCheck(NamedTuple):
    """What the static check found: reasons against the backend, and remarks."""

    reasons: tuple[Reason, ...]
    notes: tuple[str, ...]


def check_kernel(modules: tuple[str, ...], dist: Dist) -> KernelCheck:
    """Check a spec's ``kernel_modules`` and the bounds of its distribution's ``kernel`` extra.

    Args:
        modules: Importable names; each must be findable. None of them is imported.
        dist: The plugin's distribution, whose requirements name the bounds.
    """
    missing = [name for name in modules if not module_exists(name)]
    reasons = [Reason("kernel_modules", f"import {name}", "not installed") for name in missing]
    notes: list[str] = []
    for name, specifier in kernel_requirements(dist):
        version = installed_version(name)
        if version is None:
            if modules and not missing:
                # Built from source or vendored under another name: the modules are what counts.
                notes.append(f"{name}{specifier} is not installed under that name; its modules are there")
            else:
                reasons.append(Reason("kernel", f"{name}{specifier}", "not installed"))
        elif not _in_range(version, specifier):
            reasons.append(Reason("kernel", f"{name}{specifier}", f"{version} installed"))
    return KernelCheck(tuple(reasons), tuple(notes))


def module_exists(name: str) -> bool:
    """Return whether a module can be found, without running any code of its parent packages."""
    first, *rest = name.split(".")
    try:
        found = importlib.util.find_spec(first)
    except ValueError:
        # A module already in sys.modules whose __spec__ is None: it is there, in whatever way it came.
        return not rest
    full = first
    for part in rest:
        if found is None or found.submodule_search_locations is None:
            return False
        full = f"{full}.{part}"
        # find_spec on a dotted name would import the parent package; the path finder only looks.
        found = importlib.machinery.PathFinder.find_spec(full, list(found.submodule_search_locations))
    return found is not None


def kernel_requirements(dist: Dist) -> list[tuple[str, str]]:
    """Return ``(distribution, specifier)`` of each requirement that only the ``kernel`` extra asks for, sorted."""
    texts = [text for text in dist.requires if EXTRA in text.partition(";")[2]]
    if not texts:
        return []
    # packaging costs tens of milliseconds to import: only for those who declare bounds.
    from packaging.requirements import InvalidRequirement, Requirement

    found = []
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # No installer accepts it either, so it cannot be a bound that someone relies on.
        marker = requirement.marker
        if marker is not None and marker.evaluate({"extra": EXTRA}) and not marker.evaluate({"extra": ""}):
            found.append((requirement.name, str(requirement.specifier)))
    return sorted(found)


def _in_range(version: str, specifier: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidVersion:
        return False
