"""What came of each case, and of a whole run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from ..errors import ConfigError

FORMAT = 1


class Status(str, Enum):
    """The outcome of a case."""

    PROVEN = "proven"
    """Declared, and right."""
    REFUSED = "refused"
    """Not declared, and refused with its reason before any kernel ran."""
    FAILED = "failed"
    NOT_RUN = "not_run"
    """Left out, with the reason: the device lacks what it needs, or the profile or the shard leaves it to another."""
    WAIVED = "waived"
    """Failed, and the vendor has said in the open that it would."""


class Failure(AssertionError):
    """A case that a backend fails.

    Args:
        message: What was found, and what was expected.
        fault: Short name of the fault that it looks like, empty where nothing fits.
        smallest: The id of a smaller case that fails, where one was found.
    """

    def __init__(self, message: str, *, fault: str = "", smallest: str = "") -> None:
        self.fault, self.smallest = fault, smallest
        super().__init__(message)


class NotRun(Exception):
    """A case that cannot run here; says why."""


@dataclass(frozen=True, slots=True)
class Result:
    """One case's outcome."""

    case: str
    """Its id, which runs it again."""
    status: Status
    claim: str
    message: str = ""
    fault: str = ""
    seconds: float = 0.0
    served_by: str = ""
    smallest: str = ""
    """Id of the smaller case that a search found, where this case is a search."""
    topics: tuple[str, ...] = ()
    """The parts of the declaration that it is about, as 'features.sinks', for the table of what was proven."""

    @property
    def axis(self) -> str:
        return self.case.partition(":")[0]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {**asdict(self), "status": self.status.value, "seconds": round(self.seconds, 4)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Result:
        """Return what ``as_dict`` wrote."""
        return cls(**{**data, "status": Status(data["status"]), "topics": tuple(data["topics"])})


@dataclass(slots=True)
class Report:
    """A run's results with what they are of."""

    backend: str
    device: str
    profile: str
    shard: str = "1/1"
    spec: dict[str, Any] = field(default_factory=dict)
    """The declaration, as plain data."""
    versions: dict[str, str] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    waivers: dict[str, str] = field(default_factory=dict)

    def count(self, status: Status) -> int:
        """Return how many cases came to a status."""
        return sum(result.status is status for result in self.results)

    @property
    def failures(self) -> list[Result]:
        return [result for result in self.results if result.status is Status.FAILED]

    @property
    def ok(self) -> bool:
        """Whether nothing failed, and something was proven or refused."""
        return not self.failures and any(r.status in (Status.PROVEN, Status.REFUSED) for r in self.results)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "format": FORMAT,
            "backend": self.backend,
            "device": self.device,
            "profile": self.profile,
            "shard": self.shard,
            "counts": {status.value: self.count(status) for status in Status},
            "spec": self.spec,
            "versions": self.versions,
            "waivers": self.waivers,
            "results": [result.as_dict() for result in self.results],
        }

    def save(self, path: Path) -> None:
        """Write the report as JSON; a reader never sees half of it."""
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read a report.

        Raises:
            ConfigError: The file is no report of this format.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']}, expected {FORMAT}")
            results = [Result.from_dict(one) for one in data["results"]]
            names = ("backend", "device", "profile", "shard", "spec", "versions", "waivers")
            return cls(results=results, **{name: data[name] for name in names})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is no conformance report: {type(error).__name__}: {error}",
                source=str(path),
                allowed=f"JSON that `attnplug conformance --report` wrote, format {FORMAT}",
                remedy="give another file, or delete this one",
            ) from error

    def finished(self) -> dict[str, Result]:
        """Return the results that need not be run again, by case."""
        return {result.case: result for result in self.results if result.status is not Status.NOT_RUN}

    def extend(self, results: Iterable[Result]) -> None:
        """Add results."""
        self.results.extend(results)
