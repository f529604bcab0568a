"""The hooks that a plugin may implement. All are cold: called while choosing and building, never in a step or a layer.

A plugin's module imports ``hookimpl`` from here, and writes functions of these names with any of their arguments. The
specifications give no default to any argument: pluggy would drop it from the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import typer
    from pydantic import BaseModel

    from .assembly.env import BackendEnv
    from .backend import AttentionBackend
    from .decision import Decision
    from .device import DeviceFacts
    from .request import Request
    from .spec import BackendSpec

__all__ = ["HOOK_PREFIX", "PROJECT", "HookSpecs", "hookimpl"]

PROJECT = "attnplug"
HOOK_PREFIX = "attnplug_"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class HookSpecs:
    """The specifications, as one namespace that a plugin manager registers."""

    @hookspec
    def attnplug_probe(self, spec: BackendSpec, device: DeviceFacts) -> list[str]:  # type: ignore[empty-body]
        """Return run-time reasons against running here: driver, architecture, library. Empty where it runs.

        Called once for the winner of the ranking, after its plugin is loaded and before any backend is created. A
        device that is not in this machine has ``index`` None and a name with ``@``: answer from its facts alone.
        """

    @hookspec(firstresult=True)
    def attnplug_options_model(self) -> type[BaseModel] | None:
        """Return the pydantic model of ``[backend.NAME]``. Without this hook the section must be empty."""

    @hookspec(firstresult=True)
    def attnplug_create_backend(self, name: str, env: BackendEnv, options: BaseModel | None) -> AttentionBackend | None:
        """Create the backend. Only one backend's plugin is asked; an observer may wrap the call and its result.

        Args:
            name: The backend's name.
            env: All that a backend may know of where it runs.
            options: The section ``[backend.NAME]`` as the plugin's own model; None where it has no model.
        """

    @hookspec
    def attnplug_wrap_backend(self, backend: AttentionBackend, env: BackendEnv) -> AttentionBackend | None:
        """Return a wrapper around a backend, or None to leave it. Each gets what the one before returned."""

    @hookspec(historic=True)
    def attnplug_backend_created(self, name: str, backend: AttentionBackend, spec: BackendSpec) -> None:
        """Look at a backend that was created. One that registers later is told of the earlier ones too."""

    @hookspec
    def attnplug_resolve(self, request: Request) -> Sequence[str] | None:
        """Return a platform's order of backend names for a role, best first; only "auto" follows it."""

    @hookspec
    def attnplug_explain(self, decision: Decision) -> Sequence[str] | None:
        """Look at a decision; return lines to print below it."""

    @hookspec
    def attnplug_register_cli(self, app: typer.Typer) -> None:
        """Add commands to the command line."""
