"""The command line: imports only the command that was given, and for ``attnplug list`` the standard library alone."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence

from ..errors import AttnplugError

__all__ = ["main"]

USER_MUST_MEND = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 for what the user must mend.

    Args:
        argv: The arguments after the program's name; the process's by default.
    """
    _mend_streams()
    with warnings.catch_warnings():
        # Python hides deprecations that are not raised in __main__; who typed an old name should hear of it.
        warnings.filterwarnings("default", message="backend name", category=DeprecationWarning)
        warnings.showwarning = lambda message, *_: print(f"attnplug: warning: {message}", file=sys.stderr)
        try:
            _run([*(sys.argv[1:] if argv is None else argv)])
            sys.stdout.flush()
        except AttnplugError as error:
            print(f"attnplug: error: {error}", file=sys.stderr)
            return USER_MUST_MEND
        except BrokenPipeError:
            _silence()  # The reader, such as head, has what it wanted.
        except OSError as error:
            # A full disk, or a file that an option names: nothing that a traceback would explain.
            print(f"attnplug: error: {error}", file=sys.stderr)
            try:
                sys.stdout.flush()
            except OSError:
                _silence()
            return USER_MUST_MEND
        except KeyboardInterrupt:
            return INTERRUPTED
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else USER_MUST_MEND if end.code else 0
    return 0


def _mend_streams() -> None:
    """Let no terminal's encoding, nor a stream that was closed before the start, stop a command."""
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(io.FileIO(os.devnull, "w"), encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _silence() -> None:
    """Send what is left to nowhere: Python's own flush at exit must not raise again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> None:
    if arguments[:1] == ["list"]:
        # typer reads options through pydantic (0.29 does), which a listing may not import.
        from .listing import main as list_main

        list_main(arguments[1:])
        return
    from .app import app

    app(args=arguments, prog_name="attnplug")
