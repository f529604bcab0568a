"""Try mutants of torch_native and write what came of each: ``python mutation_run.py --out results.json``."""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import platform
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import torch
from mutation_equivalents import EQUIVALENT
from mutation_sites import Mutant
from mutation_trials import EXTRA, PATTERNS
from mutation_world import MUTATED, PACKAGE, Court, Verdict, all_mutants, source_path, trials

SAMPLE = 8
"""One mutant of so many is tried where not all are."""


def sampled(every: Iterable[Mutant]) -> list[Mutant]:
    """Return a fixed part: by a hash of what a mutant is, so that other lines do not change it."""
    return [m for m in every if zlib.crc32(m.id.encode()) % SAMPLE == 0]


def court() -> Court:
    """Return a court whose trials the unchanged backend passes, and nobody else's threads disturb."""
    made = Court(trials(PATTERNS, extra=EXTRA))
    made.rehearse()
    assert not made.failures, "the unchanged backend fails: " + "; ".join(made.failures)
    return made


class Outcome(NamedTuple):
    """What a run of mutants found."""

    verdicts: list[Verdict]
    """Of every mutant that is not listed as equivalent."""
    survived: list[Mutant]
    told_apart: list[Mutant]
    """Listed as equivalent, and caught all the same."""


def judge(of: Court, every: Iterable[Mutant], *, doubt: bool = False, tell: Callable[[str], object] = id) -> Outcome:
    """Try mutants; what survives some trials is given all that reach it.

    Args:
        of: The court.
        every: The mutants.
        doubt: Try those too that are listed as equivalent.
        tell: Told of each surprise as it is found.
    """
    outcome = Outcome([], [], [])
    for mutant in every:
        listed = mutant.id in EQUIVALENT
        if listed and not doubt:
            continue
        verdict = of.try_one(mutant)
        if listed:
            if verdict.killed_by:
                outcome.told_apart.append(mutant)
                tell(f"no equivalent: {mutant.id}, by {verdict.killed_by}")
            continue
        verdict = verdict if verdict.killed_by else of.try_one(mutant, thorough=True)
        outcome.verdicts.append(verdict)
        if not verdict.killed_by:
            outcome.survived.append(mutant)
            tell(f"survived: {mutant.id} (line {mutant.line}, {verdict.tried} trials)")
    return outcome


def as_report(every: list[Mutant], outcome: Outcome, seconds: float) -> dict[str, Any]:
    """Return the outcome as plain data."""
    equivalent = [m for m in every if m.id in EQUIVALENT]
    killed = [v for v in outcome.verdicts if v.killed_by]
    modules = {}
    for name in MUTATED:
        modules[name] = {
            "mutants": sum(m.module == name for m in every),
            "killed": sum(v.mutant.module == name for v in killed),
            "equivalent": sum(m.module == name for m in equivalent),
            "sha256": hashlib.sha256(source_path(f"{PACKAGE}.{name}").read_bytes()).hexdigest()[:16],
        }
    axes = Counter(v.killed_by.removeprefix("tight ").partition(":")[0] for v in killed)
    return {
        "what": "mutants of torch_native, tried by cases of the conformance suite on a CPU",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": platform.platform(),
        "revision": _revision(),
        "mutants": len(every),
        "killed": len(killed),
        "equivalent": len(equivalent),
        "survived": [m.id for m in outcome.survived],
        "listed_as_equivalent_and_caught": [m.id for m in outcome.told_apart],
        "cpu_seconds": round(seconds, 1),
        "modules": modules,
        "killed_by_axis": dict(sorted(axes.items())),
        "equivalent_by_reason": dict(Counter(EQUIVALENT[m.id] for m in equivalent).most_common()),
    }


def in_parts(every: list[Mutant], jobs: int) -> tuple[Outcome, float]:
    """Judge mutants in processes that share one rehearsal; return the outcome and the CPU seconds."""
    start, one = time.process_time(), court()

    def work(part: int, pipe: Connection) -> None:
        begun = time.process_time()
        outcome = judge(one, every[part::jobs], doubt=True, tell=lambda text: print(text, flush=True))
        pipe.send((outcome, time.process_time() - begun))

    whole, seconds, pipes = Outcome([], [], []), time.process_time() - start, []
    fork = multiprocessing.get_context("fork")
    for part in range(jobs):
        mine, theirs = fork.Pipe(duplex=False)
        fork.Process(target=work, args=(part, theirs)).start()
        pipes.append(mine)
    for pipe in pipes:
        outcome, taken = pipe.recv()
        seconds += taken
        for all_of, some in zip(whole, outcome, strict=True):
            all_of.extend(some)
    return whole, seconds


def _revision() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Try every mutant, or one in SAMPLE, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sample", action="store_true", help=f"one mutant of {SAMPLE} only")
    parser.add_argument("--jobs", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    every = sampled(all_mutants()) if chosen.sample else all_mutants()
    outcome, seconds = in_parts(every, chosen.jobs)
    report = as_report(every, outcome, seconds)
    chosen.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    counts = f"{report['killed']} killed, {report['equivalent']} equivalent, {len(outcome.survived)} survived"
    print(f"{len(every)} mutants: {counts}")


if __name__ == "__main__":
    main()
