"""The hooks of attnplug-triton; torch and triton are imported when a backend is created, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.hookspecs import hookimpl

if TYPE_CHECKING:
    from pydantic import BaseModel

    from attnplug.assembly.env import BackendEnv
    from attnplug.backend import AttentionBackend
    from attnplug.device import DeviceFacts
    from attnplug.spec import BackendSpec

LOWEST = (3, 6)
"""Oldest Triton that the kernels were compiled and run with."""


@hookimpl
def attnplug_probe(spec: BackendSpec, device: DeviceFacts) -> list[str]:
    """Ask the installed Triton for its version, and whether it compiles or interprets."""
    from .kernels.version import INTERPRETED, VERSION

    reasons = []
    if VERSION < LOWEST:
        found, needed = (".".join(map(str, version)) for version in (VERSION, LOWEST))
        reasons.append(f"triton {found} is installed; the kernels need {needed} or newer")
    elif INTERPRETED and device.type == "cuda":
        reasons.append("TRITON_INTERPRET is set, so kernels would be interpreted on the CPU; unset it to run on a GPU")
    return reasons


@hookimpl
def attnplug_options_model() -> type[BaseModel]:
    """Return the model of ``[backend.triton]``."""
    from .options import TritonOptions

    return TritonOptions


@hookimpl
def attnplug_create_backend(name: str, env: BackendEnv, options: BaseModel | None) -> AttentionBackend | None:
    """Create the backend, where it is the one that is asked for."""
    from .backend import TritonBackend
    from .options import TritonOptions
    from .spec import SPEC

    if name != SPEC.name:
        return None
    return TritonBackend(env, options if isinstance(options, TritonOptions) else TritonOptions())
