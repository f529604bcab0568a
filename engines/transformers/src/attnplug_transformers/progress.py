"""What ``attnplug generate`` tells on standard error while it works: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

__all__ = ["Reporter"]


class Reporter:
    """Reports phases of work.

    Args:
        quiet: Report nothing.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(file=sys.stderr, quiet=quiet, highlight=False)

    def say(self, text: str, style: str = "") -> None:
        """Print a line."""
        self.console.print(Text(text, style), soft_wrap=True)

    @contextlib.contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """Show that something loads, with what libraries print meanwhile left out."""
        start = time.perf_counter()
        if not self.console.is_terminal:
            self.say(f"loading {what} …")
        with self._bar(SpinnerColumn(), TextColumn("loading {task.description}"), TimeElapsedColumn()) as bar:
            bar.add_task(what, total=None)
            with _quiet_libraries():
                yield
        self.say(f"loaded {what} in {time.perf_counter() - start:.1f} s")

    @contextlib.contextmanager
    def counting(self, what: str, total: int, *, hidden: bool = False) -> Iterator[Callable[[int], None]]:
        """Show a count; yields a function that adds to it.

        Args:
            what: What is counted.
            total: How many there will be, at most.
            hidden: Keep the terminal free for text that appears as it comes.
        """
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with self._bar(*columns, hidden=hidden) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.advance(task, count)

    def _bar(self, *columns: ProgressColumn, hidden: bool = False) -> Progress:
        off = hidden or not self.console.is_terminal or self.console.quiet
        return Progress(*columns, console=self.console, transient=True, disable=off)


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Keep the progress bars and remarks of transformers and gguf off the terminal; errors still raise."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # gguf's conversion shows a bar that no setting turns off.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
