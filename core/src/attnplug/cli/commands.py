"""Which commands there are, and where each one's code is; nothing is imported before a command is given."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import typer

from .. import known
from .._metadata import COMMANDS_GROUP, scan
from ..errors import BackendConflict, BackendLoadError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable


class Command(NamedTuple):
    """A command's summary, and who brings it."""

    summary: str
    distribution: str


BUILTIN: Mapping[str, str] = {
    "list": "Show what is installed, its state and why.",
    "explain": "Say what would run here, and why not the others.",
    "resolve": "Choose the backends, and write the choice as a lock that other ranks load.",
    "validate": "Check a configuration: keys, types, versions, names and each backend's options.",
    "doctor": "Show versions, device, plugins with their tracebacks, and what to install.",
    "conformance": "Prove what a backend declares: what is proven, refused, failed, not run.",
}
"""Name and summary of each command of the core; its code is the ``app`` of ``attnplug.cli.<name>``.

``list`` alone is in ``attnplug.cli.listing``: a module of that name would hide the built-in in this package.
"""


def available() -> dict[str, Command]:
    """Return every command that can be given, without importing any: the core's, then other distributions'."""
    commands = {name: Command(summary, "attnplug") for name, summary in BUILTIN.items()}
    for announcement in scan().group(COMMANDS_GROUP):
        commands.setdefault(announcement.name, Command(f"From {announcement.dist}.", announcement.dist.name))
    return commands


def load(name: str) -> typer.Typer:
    """Import a command and return its application.

    A command of another distribution is an entry point of the group ``attnplug.commands.v1`` that names a typer
    application. Where there is none, the plugins that the configuration turns on are asked through their hook.

    Raises:
        ConfigError: There is no such command.
        BackendConflict: Two distributions bring it.
        BackendLoadError: The distribution that brings it fails to import.
    """
    if name == "list":
        from . import listing

        listing_app = typer.Typer()
        listing_app.command()(listing.show)
        return listing_app
    if name in BUILTIN:
        module = importlib.import_module(f".{name.replace('-', '_')}", __package__)
        return _typer_app(module.app, name, "attnplug")
    found = [a for a in scan().group(COMMANDS_GROUP) if a.name == name]
    if len(found) > 1:
        dists = ", ".join(str(a.dist) for a in found)
        raise BackendConflict(f"command {name!r} is brought by {dists}", remedy="uninstall one of them")
    if not found:
        return _from_plugins(name)
    try:
        loaded = found[0].entry_point.load()
    # Foreign code: an engine that fails to import is raised again with its name on it.
    except Exception as error:
        raise BackendLoadError(
            f"command {name!r} of {found[0].dist} failed to load: {type(error).__name__}: {error}",
            remedy=f"repair or reinstall {found[0].dist.name}",
        ) from error
    return _typer_app(loaded, name, str(found[0].dist))


def _from_plugins(name: str) -> typer.Typer:
    """Return a command that a plugin of ``[plugins] load`` registers."""
    from ..sources import read_sources

    plugins = read_sources().data.get("plugins")
    if isinstance(plugins, dict) and plugins.get("load"):
        from ..config import AttentionConfig
        from ..manager import BackendManager

        app = typer.Typer()
        BackendManager(config=AttentionConfig.load()).register_cli(app)
        for info in app.registered_commands:
            if info.name == name or (info.callback and info.callback.__name__.replace("_", "-") == name):
                one = typer.Typer()
                one.registered_commands.append(info)
                return one
        for group in app.registered_groups:
            if group.name == name and group.typer_instance is not None:
                return group.typer_instance
    raise _unknown(name, available())


def _unknown(name: str, names: Iterable[str]) -> ConfigError:
    names = sorted(names)
    hint = "" if name in known.COMMANDS else known.did_you_mean(name, [*names, *known.COMMANDS])
    return ConfigError(
        f"no command {name!r}; commands: {', '.join(names)}. {hint}".strip(),
        key="command",
        value=name,
        allowed=", ".join(names),
        remedy=known.install_command(name) if name in known.COMMANDS else "attnplug --help lists the commands",
    )


def _typer_app(loaded: object, name: str, who: str) -> typer.Typer:
    if not isinstance(loaded, typer.Typer):
        raise BackendLoadError(f"command {name!r} of {who} is a {type(loaded).__name__}; allowed: a typer.Typer")
    return loaded
