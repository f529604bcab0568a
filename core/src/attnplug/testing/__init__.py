"""The conformance suite: every backend is judged by it. Light to import; each name is loaded when it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .case import Case, LayerCase
    from .results import Report, Result, Status
    from .runner import run_case, run_suite
    from .subject import Subject

__all__ = ["Case", "LayerCase", "Report", "Result", "Status", "Subject", "run_case", "run_suite"]

_HOMES = {
    "Case": "case",
    "LayerCase": "case",
    "Report": "results",
    "Result": "results",
    "Status": "results",
    "Subject": "subject",
    "run_case": "runner",
    "run_suite": "runner",
}


def __getattr__(name: str) -> Any:
    """Import the home of a public name; the pytest plugin, which every pytest run imports, needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
