"""The command line: a small application that imports only the command that was given."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from ..errors import AttnplugError
from .group import LazyGroup

__all__ = ["app", "main"]

USER_MUST_MEND = 2

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 for what the user must mend.

    Args:
        argv: The arguments after the program's name; the process's by default.
    """
    with warnings.catch_warnings():
        # Python hides deprecations that are not raised in __main__; who typed an old name should hear of it.
        warnings.filterwarnings("default", message="backend name", category=DeprecationWarning)
        warnings.showwarning = lambda message, *_: print(f"attnplug: warning: {message}", file=sys.stderr)
        try:
            app(args=list(sys.argv[1:] if argv is None else argv), prog_name="attnplug")
        except AttnplugError as error:
            print(f"attnplug: error: {error}", file=sys.stderr)
            return USER_MUST_MEND
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else USER_MUST_MEND if end.code else 0
    return 0
