"""Turn pydantic's complaints into one ConfigError: file, key, value, what is allowed, and the nearest right key."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from . import known
from .errors import ConfigError
from .sources import Rung


class _Fault(NamedTuple):
    key: str
    value: str
    allowed: str
    text: str


def config_error(
    error: ValidationError,
    model: type[BaseModel],
    *,
    source: str = "",
    prefix: str = "",
    rungs: Mapping[str, Rung] | None = None,
) -> ConfigError:
    """Return the ConfigError that names every fault of a validation at once.

    Args:
        error: What pydantic raised.
        model: The model that was validated; nearest keys are looked for in it.
        source: The file or option, where no rung is known.
        prefix: Dotted key of the model inside the whole configuration.
        rungs: Where each dotted key came from.
    """
    faults: dict[str, list[_Fault]] = {}
    for detail in error.errors(include_url=False):
        path = _key_path(detail["loc"], model)
        faults.setdefault(".".join((*filter(None, [prefix]), *path)), []).append(_fault(detail, path, model, prefix))
    lines, firsts = [], []
    for key, several in faults.items():
        # A union complains once for each member; what they allow is said in one line.
        first = several[0]
        allowed = " or ".join(dict.fromkeys(fault.allowed for fault in several if fault.allowed))
        where = _source(key, rungs or {}) or source
        text = first.text if not allowed else f"{first.text}; allowed: {allowed}"
        lines.append(f"{where}: {text}" if where else text)
        firsts.append((where, key, first.value, allowed))
    where, key, value, allowed = firsts[0]
    return ConfigError("\n".join(lines), source=where, key=key, value=value, allowed=allowed)


def _fault(detail: Any, path: tuple[str, ...], model: type[BaseModel], prefix: str) -> _Fault:
    key = ".".join((*filter(None, [prefix]), *path))
    value = repr(detail["input"])
    value = value if len(value) <= 60 else value[:57] + "..."
    if detail["type"] == "extra_forbidden":
        keys = sorted(_model_at(model, path[:-1]).model_fields)
        near = known.nearest(path[-1], keys) or [
            one for one in _all_keys(model) if one.rpartition(".")[2] == path[-1] and one != ".".join(path)
        ]
        if near:
            table = ".".join((*filter(None, [prefix]), *path[:-1]))
            full = [one if "." in one or not table else f"{table}.{one}" for one in near]
            hint = f"; did you mean {' or '.join(repr(one) for one in full)}?"
        else:
            hint = ""
        return _Fault(key, value, ", ".join(keys), f"unknown key {key!r}{hint}")
    allowed = detail.get("ctx", {}).get("expected") or _ALLOWED.get(detail["type"], "")
    ctx = detail.get("ctx", {})
    if detail["type"] == "greater_than_equal":
        allowed = f"≥ {ctx['ge']}"
    text = f"{key} is {value}"
    return _Fault(key, value, str(allowed), text if allowed else f"{text}: {detail['msg']}")


_ALLOWED = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "int_type": "a whole number",
    "list_type": "a list of names",
    "model_type": "a table",
    "string_pattern_mismatch": "letters, digits, '_', '-' and '.'",
    "string_too_short": "a name",
    "string_type": "a text",
    "too_short": "a list that is not empty",
    "tuple_type": "a list",
}


def _key_path(loc: tuple[int | str, ...], model: type[BaseModel]) -> tuple[str, ...]:
    """Return the part of pydantic's location that the file has: union members and list places are left out."""
    path: list[str] = []
    current: Any = model
    for part in loc:
        if isinstance(part, int):
            break
        fields = getattr(current, "model_fields", None)
        if fields is None and path and not _is_table(current):
            break
        path.append(part)
        current = fields[part].annotation if fields and part in fields else _inner(current)
        if fields is not None and part not in fields:
            break
    return tuple(path)


def _is_table(annotation: Any) -> bool:
    return typing.get_origin(annotation) is dict


def _inner(annotation: Any) -> Any:
    return typing.get_args(annotation)[1] if _is_table(annotation) else None


def _model_at(model: type[BaseModel], path: tuple[str, ...]) -> type[BaseModel]:
    for part in path:
        annotation = model.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        model = annotation
    return model


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _all_keys(field.annotation, f"{prefix}{name}.")


def _source(key: str, rungs: Mapping[str, Rung]) -> str:
    for one, rung in rungs.items():
        if one == key or one.startswith(key + "."):
            return rung.source
    return ""
