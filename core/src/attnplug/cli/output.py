"""What commands print: tables for readers, plain columns where nobody looks, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

_STYLES = {
    "READY": "green",
    "LOADED": "green",
    "SELECTED": "green",
    "ELIGIBLE": "green",
    "DESCRIBED": "green",
    "REJECTED": "yellow",
    "BLOCKED": "yellow",
    "MISSING_KERNEL": "yellow",
    "INCOMPATIBLE": "red",
    "CONFLICT": "red",
    "BROKEN_SPEC": "red",
    "BROKEN_LOAD": "red",
}


def print_json(data: Any) -> None:
    """Print data as JSON."""
    print(json.dumps(data, indent=2, ensure_ascii=False))


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under headers: coloured on a terminal, aligned columns elsewhere."""
    if sys.stdout.isatty():
        # rich costs as much as all else of a listing; a pipe does without.
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*headers, box=None, header_style="bold", pad_edge=False)
        for row in rows:
            table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(headers, *rows)]
    for row in (headers, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def print_lines(title: str, lines: Sequence[str]) -> None:
    """Print lines under a title; nothing where there are none."""
    if lines:
        print(f"\n{title}")
        for line in lines:
            print("  " + line.replace("\n", "\n  "))
