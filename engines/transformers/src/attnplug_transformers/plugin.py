"""The engine's hooks, for those who turn it on by ``[plugins] load``; its command needs none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.hookspecs import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def attnplug_register_cli(app: typer.Typer) -> None:
    """Add ``generate``, for applications that are not attnplug's own command line."""
    from .cli import command

    app.command("generate")(command)
