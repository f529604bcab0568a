"""Hugging Face models served on attnplug backends: continuous batching, paged KV, any installed backend.

Nothing heavy is imported until a name is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .encoder import Encoder, Encoding
    from .engine import Engine
    from .errors import EngineError, RequestRefused
    from .results import Completion, StepOutput, StreamChunk
    from .sampling import SamplingParams

__all__ = [
    "Completion",
    "Encoder",
    "Encoding",
    "Engine",
    "EngineError",
    "RequestRefused",
    "SamplingParams",
    "StepOutput",
    "StreamChunk",
]

_HOMES = {
    "Completion": "results",
    "Encoder": "encoder",
    "Encoding": "encoder",
    "Engine": "engine",
    "EngineError": "errors",
    "RequestRefused": "errors",
    "SamplingParams": "sampling",
    "StepOutput": "results",
    "StreamChunk": "results",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{home}", __name__), name)
