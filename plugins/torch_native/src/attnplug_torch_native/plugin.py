"""The hooks of torch_native; torch is imported when a backend is created, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.hookspecs import hookimpl

if TYPE_CHECKING:
    from pydantic import BaseModel

    from attnplug.assembly.env import BackendEnv
    from attnplug.backend import AttentionBackend
    from attnplug.device import DeviceFacts
    from attnplug.spec import BackendSpec


@hookimpl
def attnplug_probe(spec: BackendSpec, device: DeviceFacts) -> list[str]:
    """Plain PyTorch runs wherever the declared device types are."""
    return []


@hookimpl
def attnplug_options_model() -> type[BaseModel]:
    """Return the model of ``[backend.torch_native]``."""
    from .options import TorchNativeOptions

    return TorchNativeOptions


@hookimpl
def attnplug_create_backend(name: str, env: BackendEnv, options: BaseModel | None) -> AttentionBackend | None:
    """Create the backend, where it is the one that is asked for."""
    from .backend import TorchNativeBackend
    from .options import TorchNativeOptions
    from .spec import SPEC

    if name != SPEC.name:
        return None
    return TorchNativeBackend(env, options if isinstance(options, TorchNativeOptions) else TorchNativeOptions())
