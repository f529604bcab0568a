"""What every result file says of where it was measured, and how it is written."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write(name: str, report: dict[str, Any], packages: Iterable[str]) -> None:
    """Print a report and write it to ``results/<name>.json``, with machine, versions and revision."""
    full = report | {
        "machine": {"platform": platform.platform(), "cpu": _cpu(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in packages},
        "revision": _revision(),
    }
    path = Path(__file__).parent / "results" / f"{name}.json"
    path.write_text(json.dumps(full, indent=2) + "\n")
    print(json.dumps(full, indent=2))


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _revision() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()
