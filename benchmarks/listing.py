"""How much longer ``attnplug list`` takes than ``python -c pass``: medians of many fresh interpreters, interleaved.

Run: python benchmarks/listing.py [--runs 31]; writes benchmarks/results/listing.json.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

LIMIT_MS = 150.0
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "attnplug list": ["-m", "attnplug", "list"],
    "attnplug list --json": ["-m", "attnplug", "list", "--json"],
    "attnplug --help": ["-m", "attnplug", "--help"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=31)
    runs: int = parser.parse_args().runs
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    cpu_times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    load = os.getloadavg()
    for _ in range(runs + 1):
        # Interleaved, so that what else the machine does falls on all alike.
        for name, arguments in COMMANDS.items():
            wall, busy = milliseconds(arguments)
            times[name].append(wall)
            cpu_times[name].append(busy)
    # The first of each fills caches of the file system.
    medians = {name: round(statistics.median(values[1:]), 1) for name, values in times.items()}
    extra = round(medians["attnplug list"] - medians["python -c pass"], 1)
    report = {
        "what": "milliseconds a fresh interpreter, medians",
        "runs": runs,
        "medians_ms": medians,
        "spread_ms": {name: [round(min(v[1:]), 1), round(max(v[1:]), 1)] for name, v in times.items()},
        "list_over_pass_ms": extra,
        # Wall time grows with what else the machine does; these two say how much of it that was.
        "cpu_medians_ms": {name: round(statistics.median(values[1:]), 1) for name, values in cpu_times.items()},
        "load_average_before_and_after": [round(load[0], 2), round(os.getloadavg()[0], 2)],
        "limit_ms": LIMIT_MS,
        "backends_listed": len(listed()),
        "distributions_installed": len(list(importlib.metadata.distributions())),
        "machine": {"platform": platform.platform(), "cpu": cpu(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "attnplug": importlib.metadata.version("attnplug")},
        "revision": revision(),
    }
    path = Path(__file__).parent / "results" / "listing.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    return 0 if extra < LIMIT_MS else 1


def milliseconds(arguments: list[str]) -> tuple[float, float]:
    """Return the wall time and the CPU time of one fresh interpreter."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall * 1e3, busy * 1e3


def listed() -> list[object]:
    command = [sys.executable, "-m", "attnplug", "list", "--json"]
    rows: list[object] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return rows


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def revision() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
