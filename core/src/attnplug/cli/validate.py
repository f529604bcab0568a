"""``attnplug validate``: every fault of a configuration at once."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import AttnplugError, UnknownBackend
from ..sources import FILE, Rung, Sources, read_file, read_sources
from .options import Json
from .output import print_json

if TYPE_CHECKING:
    from ..config import AttentionConfig

app = typer.Typer(add_completion=False)

_ROLE_KEYS = ("prefill", "decode", "linear", "draft.prefill", "draft.decode")


@app.command()
def command(
    path: Annotated[str | None, typer.Argument(help="A TOML, JSON or YAML file; the whole ladder without it.")] = None,
    config: Annotated[str | None, typer.Option("--config", help="The same as PATH.")] = None,
    as_json: Json = False,
) -> None:
    """Check a configuration: keys, types, versions, names and each backend's options."""
    path = path or config
    problems, notes = check(path)
    if as_json:
        rows = [
            {"message": error.message, "remedy": error.remedy, "key": getattr(error, "key", "")} for error in problems
        ]
        print_json({"source": path or "", "ok": not problems, "problems": rows, "notes": notes})
    elif not problems:
        print(f"{path or 'configuration'}: ok")
        for note in notes:
            print(f"  note: {note}")
    else:
        for error in problems:
            print(f"attnplug: error: {error}", file=sys.stderr)
    if problems:
        raise typer.Exit(2)


def check(path: str | None) -> tuple[list[AttnplugError], list[str]]:
    """Return every fault of a configuration, and remarks on what could not be checked here."""
    from ..config import AttentionConfig
    from ..manager import BackendManager

    problems: list[AttnplugError] = []
    notes: list[str] = []
    sources = Sources()
    try:
        if path:
            sources.merge(read_file(path), Rung(FILE, path))
        else:
            sources = read_sources()
        config = AttentionConfig.from_sources(sources)
    except AttnplugError as error:
        problems.append(error)
        # What is well-formed beside the fault is checked too, so that one run tells all.
        config = _sound_part(sources)
    try:
        config.check_requires()
    except AttnplugError as error:
        problems.append(error)
    catalog = config.catalog()
    for key in _ROLE_KEYS:
        names = config.names(f"attention.{key}") or ()
        for name in names:
            if name == "auto":
                continue
            try:
                catalog.require(name)
            except UnknownBackend as error:
                if len(names) > 1 and error.remedy.startswith("pip"):
                    notes.append(f"attention.{key}: {name!r} is not installed here, the next in the list will serve")
                else:
                    problems.append(error)
            except AttnplugError as error:
                problems.append(error)
    unchecked = config.model_copy(update={"requires": {}})
    try:
        manager = BackendManager(catalog, unchecked)
    except AttnplugError as error:
        return _distinct([*problems, error]), notes
    for name in config.backend:
        try:
            manager.options(name)
        except UnknownBackend as error:
            if error.remedy.startswith("pip install") and not error.message.endswith("?"):
                notes.append(f"backend.{name} cannot be checked: not installed; {error.remedy}")
            else:
                problems.append(error)
        except AttnplugError as error:
            problems.append(error)
    return _distinct(problems), notes


def _sound_part(sources: Sources) -> AttentionConfig:
    """Return the configuration without its faulty tables."""
    from ..config import AttentionConfig

    sound = Sources(rungs=sources.rungs)
    for table, value in sources.data.items():
        try:
            AttentionConfig.model_validate({table: value})
        except AttnplugError:
            continue
        sound.data[table] = value
    return AttentionConfig.from_sources(sound)


def _distinct(problems: list[AttnplugError]) -> list[AttnplugError]:
    """Leave out what several keys complain of in the same words."""
    return list({error.message: error for error in problems}.values())
