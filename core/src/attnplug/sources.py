"""The configuration ladder as raw data with the rung each value came from: standard library only, nothing validated.

Command line > environment > file > ``pyproject.toml`` > auto. ``config`` validates what this reads; ``attnplug list``
needs only a few raw keys of it and so imports no pydantic.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from . import known
from .errors import ConfigError

ENV_PREFIX = "ATTNPLUG_"
ENV_CONFIG = "ATTNPLUG_CONFIG"
_NAMES, _TEXT, _INT, _FLAG = "names", "text", "int", "flag"
ENV_KEYS: Mapping[str, tuple[str, str]] = {
    "ATTNPLUG_PREFILL": ("attention.prefill", _NAMES),
    "ATTNPLUG_DECODE": ("attention.decode", _NAMES),
    "ATTNPLUG_LINEAR": ("attention.linear", _NAMES),
    "ATTNPLUG_DRAFT_PREFILL": ("attention.draft.prefill", _NAMES),
    "ATTNPLUG_DRAFT_DECODE": ("attention.draft.decode", _NAMES),
    "ATTNPLUG_SPECULATIVE_ATTENTION_MODE": ("attention.speculative_attention_mode", _TEXT),
    "ATTNPLUG_FALLBACK": ("attention.fallback", _TEXT),
    "ATTNPLUG_KV_DTYPE": ("attention.kv_dtype", _TEXT),
    "ATTNPLUG_PAGE_SIZE": ("attention.page_size", _INT),
    "ATTNPLUG_GRAPHS": ("attention.graphs", _TEXT),
    "ATTNPLUG_BLOCK": ("plugins.block", _NAMES),
    "ATTNPLUG_ALLOW": ("plugins.allow", _NAMES),
    "ATTNPLUG_PLUGINS": ("plugins.load", _NAMES),
    "ATTNPLUG_STRICT": ("plugins.strict", _FLAG),
}
"""Each variable, the key it sets, and how its text is read. A list is separated by commas."""


class Rung(NamedTuple):
    """Where a value came from: the rung of the ladder, and the file, variable or option on it."""

    name: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.source})" if self.source else self.name


COMMAND_LINE, ENVIRONMENT, FILE, PYPROJECT, CODE, AUTO_RUNG = (
    "command line",
    "environment",
    "file",
    "pyproject",
    "code",
    "auto",
)


@dataclass(slots=True)
class Sources:
    """Raw configuration, merged key by key, with the rung of each key."""

    data: dict[str, Any] = field(default_factory=dict)
    rungs: dict[str, Rung] = field(default_factory=dict)

    def merge(self, data: Mapping[str, Any], rung: Rung) -> None:
        """Lay one rung's data over what is there; its keys win."""
        for path, value in _leaves(data):
            table = self.data
            for part in path[:-1]:
                inner = table.get(part)
                if not isinstance(inner, dict):
                    inner = table[part] = {}
                table = inner
            if path:
                table[path[-1]] = value
                self.rungs[".".join(path)] = rung


def read_sources(
    path: str | os.PathLike[str] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> Sources:
    """Read every rung of the ladder.

    Args:
        path: The configuration file; the one that ATTNPLUG_CONFIG names by default.
        overrides: The command line's values, by dotted key such as ``"attention.prefill"``.
        env: The environment; the process's by default.
        cwd: Where the search for ``pyproject.toml`` starts, upward; the working directory by default.

    Raises:
        ConfigError: A file cannot be read, or a variable is unknown or of the wrong type.
    """
    env = os.environ if env is None else env
    sources = Sources()
    project = find_pyproject(cwd)
    if project is not None:
        sources.merge(read_file(project), Rung(PYPROJECT, str(project)))
    if path is None:
        path = env.get(ENV_CONFIG) or None
    if path is not None:
        sources.merge(read_file(path), Rung(FILE, str(path)))
    for variable, key, value in _environment(env):
        sources.merge(_nested(key, value), Rung(ENVIRONMENT, variable))
    for key, value in (overrides or {}).items():
        option = "plugin" if key == "plugins.load" else key.removeprefix("attention.")
        sources.merge(_nested(key, value), Rung(COMMAND_LINE, "--" + option.replace(".", "-").replace("_", "-")))
    return sources


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the tables of a TOML, JSON or YAML file; of a ``pyproject.toml``, those under ``[tool.attnplug]``.

    Raises:
        ConfigError: The file is absent, of another kind, malformed, or holds no table at its top.
    """
    file = Path(path)
    readers: dict[str, Callable[[str], Any]] = {".toml": _toml, ".json": _json, ".yaml": _yaml, ".yml": _yaml}
    reader = readers.get(file.suffix.lower())
    if reader is None:
        allowed = ".toml, .json, .yaml, .yml"
        message = f"configuration file {file} has the suffix {file.suffix!r}; allowed: {allowed}"
        raise ConfigError(message, source=str(file), value=file.suffix, allowed=allowed)
    try:
        # Editors on Windows begin a file with a byte-order mark, which no reader here knows.
        data = reader(file.read_text(encoding="utf-8-sig"))
        deque(_leaves(data) if isinstance(data, dict) else (), maxlen=0)  # An anchor of YAML may hold itself.
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration file {file}: {error.strerror or error}",
            source=str(file),
            remedy="name a file that exists: --config FILE",
        ) from error
    except ValueError as error:  # TOMLDecodeError, JSONDecodeError and UnicodeDecodeError all are.
        kind = file.suffix[1:].upper()
        raise ConfigError(f"configuration file {file} is not valid {kind}: {error}", source=str(file)) from error
    except RecursionError as error:
        message = f"configuration file {file} is nested too deeply; allowed: tables such as [attention]"
        raise ConfigError(message, source=str(file), allowed="tables") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        message = f"configuration file {file} holds a {type(data).__name__}; allowed: tables such as [attention]"
        raise ConfigError(message, source=str(file), value=type(data).__name__, allowed="tables")
    if file.name == "pyproject.toml":
        tool = data.get("tool", {})
        data = tool.get("attnplug", {}) if isinstance(tool, dict) else tool
        if not isinstance(data, dict):
            raise ConfigError(f"[tool.attnplug] of {file} is not a table", source=str(file), key="tool.attnplug")
    return data


def find_pyproject(start: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the nearest ``pyproject.toml`` upward that has a ``[tool.attnplug]`` table."""
    try:
        folder = Path(start) if start is not None else Path.cwd()
    except FileNotFoundError:  # Somebody removed the working directory.
        return None
    for parent in (folder, *folder.parents):
        file = parent / "pyproject.toml"
        try:
            # Somebody else's file: only one that speaks of us is read as TOML at all.
            if "tool.attnplug" in file.read_text(encoding="utf-8"):
                return file
        except (OSError, UnicodeDecodeError):
            continue
    return None


def _environment(env: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    for variable in sorted(name for name in env if name.startswith(ENV_PREFIX) and name != ENV_CONFIG):
        if variable not in ENV_KEYS:
            names = [*ENV_KEYS, ENV_CONFIG]
            raise ConfigError(
                f"unknown environment variable {variable}; {known.did_you_mean(variable, names)}".rstrip("; "),
                source=variable,
                value=env[variable],
                allowed=", ".join(sorted(names)),
                remedy=f"unset {variable}, or write one of: {', '.join(sorted(names))}",
            )
        key, kind = ENV_KEYS[variable]
        yield variable, key, parse_text(env[variable], kind, source=variable, key=key)


def parse_text(text: str, kind: str, *, source: str, key: str) -> Any:
    """Return what a variable's or an option's text means for a key of that kind."""
    text = text.strip()
    if kind == _NAMES:
        names = [name.strip() for name in text.split(",") if name.strip()]
        return names[0] if len(names) == 1 and key.startswith("attention.") else names
    # A number of more digits than this is none that a key takes, and Python refuses to read thousands of them.
    if kind == _INT and re.fullmatch("-?[0-9]{1,18}", text):
        return int(text)
    if kind == _FLAG:
        flags = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}
        if text.lower() not in flags:
            allowed = "1, true, yes, 0, false, no"
            message = f"{source} is {text!r}; allowed: {allowed}"
            raise ConfigError(message, source=source, key=key, value=text, allowed=allowed)
        return flags[text.lower()]
    return text


def _nested(key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: _nested(rest, value) if rest else value}


def _leaves(data: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in data.items():
        here = (*path, str(key))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, here)
        else:
            yield here, value


def _toml(text: str) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_once)


def _yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that is given twice, as TOML does; YAML's own readers take the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = (key for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            _once((key.value, None) for key in keys if key.tag != "tag:yaml.org,2002:merge")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _once(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return the pairs as a dict.

    Raises:
        ValueError: A key is given twice.
    """
    table: dict[Any, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"key {key!r} is given twice")
        table[key] = value
    return table
