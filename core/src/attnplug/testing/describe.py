"""A declaration and the software around it as plain data, for reports."""

from __future__ import annotations

import dataclasses
import platform
from enum import Enum
from typing import Any

import torch

from .._metadata import installed_version
from ..spec import BackendSpec, Dims


def spec_as_dict(spec: BackendSpec) -> dict[str, Any]:
    """Return every field of a declaration as JSON-ready data."""
    return {one.name: _plain(getattr(spec, one.name)) for one in dataclasses.fields(spec)}


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for name in ("attnplug", "triton", "flashinfer-python"):
        version = installed_version(name)
        if version:
            found[name] = version
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Dims):
        return str(value)
    if isinstance(value, (set, frozenset)):
        return sorted(str(_plain(one)) for one in value)
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value
