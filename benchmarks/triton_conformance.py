"""Run the conformance suite on the Triton backend with many processes on one GPU, since most of its time is compiling.

    python benchmarks/triton_conformance.py --workers 14 --seconds 240 --json out.json

Cases that the time does not reach are counted as not run.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing as mp
import os
import queue as queue_module
import time
from pathlib import Path

FIRST = "DEIHABLKJPGFC"


def work(index: int, count: int, deadline: float, profile: str, device: str, match: list[str], queue: mp.Queue) -> None:
    import torch

    from attnplug.testing import run_case
    from attnplug.testing.plan import Plan, Profile
    from attnplug.testing.runner import list_cases
    from attnplug.testing.subject import Subject

    torch.set_num_threads(1)
    subject = Subject.find("triton", device)
    cases = list_cases(Plan(subject, Profile.named(profile)))
    cases = [case for case in cases if not match or any(case.id.startswith(start) for start in match)]
    cases.sort(key=lambda case: FIRST.index(case.axis))
    for case in cases[index::count]:
        if time.time() > deadline:
            queue.put((case.id, case.axis, "NOT_RUN", "", "the time was up", 0.0))
            continue
        result = run_case(subject, case)
        queue.put((case.id, case.axis, result.status.name, result.fault, result.message, round(result.seconds, 2)))
    queue.put(None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--profile", default="gpu")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--match", nargs="*", default=[], help="beginnings of case ids; every case by default")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    context = mp.get_context("spawn")
    queue: mp.Queue = context.Queue()
    deadline = time.time() + args.seconds
    workers = [
        context.Process(
            target=work, args=(i, args.workers, deadline, args.profile, args.device, args.match, queue), daemon=True
        )
        for i in range(args.workers)
    ]
    for worker in workers:
        worker.start()
    rows, done = [], 0
    while done < args.workers and time.time() < deadline + 45:
        try:
            row = queue.get(timeout=5)
        except queue_module.Empty:
            if not any(worker.is_alive() for worker in workers):
                break
            continue
        if row is None:
            done += 1
        else:
            rows.append(row)
    counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for _, axis, status, *_rest in rows:
        counts[axis][status] += 1
    for row in rows:
        if row[2] not in ("PROVEN", "REFUSED") and row[4] != "the time was up":
            print(row[2], row[0], "|", row[3], "|", row[4][:500].replace("\n", " / "))
    for axis in sorted(counts):
        print(axis, dict(counts[axis]))
    total = collections.Counter(row[2] for row in rows)
    print("conformance", args.profile, dict(total), "workers finished", done)
    kept = [row for row in rows if row[2] not in ("PROVEN", "REFUSED") and row[4] != "the time was up"]
    args.json.write_text(
        json.dumps(
            {
                "profile": args.profile,
                "seconds": args.seconds,
                "match": args.match,
                "total": total,
                "axes": counts,
                "open": kept,
                "not_run": [row[0] for row in rows if row[4] == "the time was up"],
            },
            indent=1,
        )
    )
    for worker in workers:
        worker.terminate()


if __name__ == "__main__":
    main()
