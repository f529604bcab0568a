"""The typer application: the root of every command but the fast path of ``attnplug list``."""

from __future__ import annotations

from typing import Annotated

import typer

from .group import LazyGroup

app = typer.Typer(
    cls=LazyGroup,
    name="attnplug",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(asked: bool) -> None:
    if asked:
        from .._metadata import installed_version

        typer.echo(f"attnplug {installed_version('attnplug')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Attention kernels as plugins for LLM serving."""
