"""The child of ``isolate``: reads a job from stdin, runs it, and says over a pipe what starts and what came of it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import Any

from ..errors import AttnplugError
from .case import Case
from .plan import Plan, Profile
from .results import Status
from .runner import list_cases, new_report, run_case
from .subject import Subject

USER_MUST_MEND = 2
BROKEN_DEVICE = 3
"""Exit code after a fault that leaves the device's context unusable: the parent goes on in a fresh process."""


def main() -> int:
    """Run the job; return the exit code."""
    job: dict[str, Any] = json.load(sys.stdin)
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as pipe:

        def say(**line: Any) -> None:
            pipe.write(json.dumps(line) + "\n")
            pipe.flush()

        index, count = job["shard"]
        try:
            subject = Subject.find(job["backend"], job["device"] or None)
            plan = Plan(subject, Profile.named(job["profile"]))
            cases = [Case.parse(job["case"])] if job["case"] else list_cases(plan, job["axes"], shard=(index, count))
            for case in cases:
                _claim(case)
        except AttnplugError as error:
            say(error=str(error))
            return USER_MUST_MEND
        report = new_report(plan, shard=f"{index}/{count}", waivers=job["waivers"]).as_dict()
        names = ("backend", "device", "profile", "shard", "spec", "versions", "waivers")
        say(report={name: report[name] for name in names}, claims={case.id: _claim(case) for case in cases})
        skip = set(job["skip"])
        for case in cases:
            if case.id in skip:
                continue
            say(start=case.id)
            result = run_case(subject, case, waivers=job["waivers"])
            broken = _device_is_broken(subject)
            if broken and result.status is not Status.FAILED:
                result = replace(
                    result, status=Status.FAILED, message=f"{result.message}; {broken}", fault="breaks the device"
                )
            say(result=result.as_dict())
            if broken:
                return BROKEN_DEVICE
    return 0


def _claim(case: Case) -> str:
    from .axes import find_check

    return find_check(case.axis, case.check).claim


def _device_is_broken(subject: Subject) -> str:
    """Return why nothing can run on the device any more; empty where it is well."""
    if subject.device.type != "cuda":
        return ""
    import torch

    try:
        torch.cuda.synchronize(subject.device)
        torch.zeros(1, device=subject.device).add_(1).item()
    except RuntimeError as error:
        return f"the device is unusable afterwards: {str(error).splitlines()[0]}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
