"""``attnplug list``: what is installed, its state and why. Imports neither torch nor pydantic."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from .. import known
from ..catalog import Catalog
from ..errors import ConfigError
from ..sources import Sources, read_sources
from .output import print_json, print_lines, print_table


def main(arguments: Sequence[str]) -> None:
    """Run the command on its arguments, read by the standard library."""
    parser = argparse.ArgumentParser("attnplug list", description="Show what is installed, its state and why.")
    parser.add_argument("--config", metavar="FILE", help="A TOML, JSON or YAML file.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    given = parser.parse_args(arguments)
    show(given.config, given.json)


def show(config: str | None = None, json: bool = False) -> None:
    """Show what is installed, its state and why."""
    catalog = raw_catalog(read_sources(config))
    entries = catalog.entries
    if json:
        print_json([entry.as_dict() for entry in entries])
        return
    if not entries:
        print("no backend is installed")
        print(f"  remedy: {known.install_command(known.REFERENCE)}")
        return
    print_table(
        ("NAME", "STATE", "DISTRIBUTION", "VERSION", "SUMMARY"),
        [(e.name, e.state.value, e.distribution, e.version, e.spec.summary if e.spec else "") for e in entries],
    )
    reasons = [f"{entry.name} ({entry.dist}): {reason}" for entry in entries for reason in entry.reasons]
    print_lines("Why not:", reasons)
    print_lines("Notes:", [f"{entry.name}: {note}" for entry in entries for note in entry.notes])


def raw_catalog(sources: Sources) -> Catalog:
    """Return the catalog under a configuration that was not validated: pydantic is too dear for a listing."""
    plugins = _mapping(sources, "plugins")
    providers = _mapping(sources, "provider")
    allow = plugins.get("allow")
    return Catalog(
        block=_texts(sources, "plugins.block", plugins.get("block", [])),
        allow=None if allow is None else _texts(sources, "plugins.allow", allow),
        providers={name: str(dist) for name, dist in providers.items()},
    )


def _mapping(sources: Sources, key: str) -> Mapping[str, Any]:
    value = sources.data.get(key, {})
    if not isinstance(value, Mapping):
        raise _wrong(sources, key, value, "a table")
    return value


def _texts(sources: Sources, key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise _wrong(sources, key, value, "a list of names")
    return value


def _wrong(sources: Sources, key: str, value: Any, allowed: str) -> ConfigError:
    source = sources.rungs[key].source if key in sources.rungs else ""
    where = f"{source}: " if source else ""
    message = f"{where}{key} is {value!r}; allowed: {allowed}"
    return ConfigError(message, source=source, key=key, value=repr(value), allowed=allowed)
