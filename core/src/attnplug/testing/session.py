"""One pytest run of the suite: the subject, the cases, and a report that another run can go on with."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import pytest

from .case import Case
from .isolate import SAVE_EVERY, check_same_run
from .options import parse_axes, parse_profile, parse_shard, parse_waivers
from .plan import Plan, Profile
from .report import failure_text
from .results import Report, Result, Status
from .runner import list_cases, new_report, run_case
from .subject import Subject

_KEY: pytest.StashKey[Session] = pytest.StashKey()


class Session:
    """A run's state, made when the first test is collected.

    Args:
        config: pytest's, with the plugin's options.

    Raises:
        AttnplugError: The backend, device or another option is not usable.
    """

    def __init__(self, config: pytest.Config) -> None:
        profile = Profile.named(parse_profile(config.getoption("--attn-profile")))
        self._axes = parse_axes(config.getoption("--attn-axes"))
        self._shard = parse_shard(config.getoption("--attn-shard"))
        self._one = config.getoption("--attn-case")
        self._waivers = parse_waivers(config.getoption("--attn-waive"))
        path = config.getoption("--attn-report")
        self._path = Path(path) if path else None
        self.subject = Subject.find(config.getoption("--attn-backend"), config.getoption("--attn-device") or None)
        self._plan = Plan(self.subject, profile)
        index, count = self._shard
        self.report = new_report(self._plan, shard=f"{index}/{count}", waivers=self._waivers)
        self._done: dict[str, Result] = {}
        if self._path is not None and self._path.exists():
            check_same_run(self.report, self._path)
            self._done = Report.load(self._path).finished()

    @classmethod
    def of(cls, config: pytest.Config) -> Session:
        """Return the run of a pytest process, made at the first call."""
        if _KEY not in config.stash:
            config.stash[_KEY] = cls(config)
        return config.stash[_KEY]

    @cached_property
    def cases(self) -> list[Case]:
        """The cases of this run, in order."""
        return [Case.parse(self._one)] if self._one else list_cases(self._plan, self._axes, shard=self._shard)

    def judge(self, case: Case) -> None:
        """Run a case, or take what an earlier run found, and fail or skip the test with the reason."""
        result = self._done.get(case.id)
        if result is None:
            result = run_case(self.subject, case, waivers=self._waivers)
            self._done[case.id] = result
            if len(self._done) % SAVE_EVERY == 0:
                self.save()
        if result.status is Status.FAILED:
            pytest.fail(failure_text(self.subject.name, result), pytrace=False)
        if result.status is Status.NOT_RUN:
            pytest.skip(result.message)
        if result.status is Status.WAIVED:
            pytest.xfail(result.message)

    def save(self) -> None:
        """Write the report, where one is asked for."""
        order = dict.fromkeys([*(case.id for case in self.cases), *self._done])
        self.report.results = [self._done[case] for case in order if case in self._done]
        if self._path is not None:
            self.report.save(self._path)
