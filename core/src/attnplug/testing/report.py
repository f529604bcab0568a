"""A run for readers: what was declared, what was proven of it, what was refused, what failed, what was not run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .results import Report, Result, Status

MOST = 200
"""Failures written out whole; a report of more is not read."""


class Standing:
    """How a word of the declaration stands: its cases by status."""

    def __init__(self) -> None:
        self.counts: Counter[Status] = Counter()

    @property
    def word(self) -> str:
        """One word: failed before proven, and 'not run' where no case is about it."""
        for status in (Status.FAILED, Status.WAIVED, Status.PROVEN):
            if self.counts[status]:
                return str(status.value)
        return "not run"


def standings(report: Report) -> dict[str, Standing]:
    """Return every declared word, such as 'features.sinks', with how it stands."""
    found = {word: Standing() for word in declared_words(report)}
    for result in report.results:
        for topic in result.topics:
            if topic in found:
                found[topic].counts[result.status] += 1
    return found


def declared_words(report: Report) -> list[str]:
    """Return the words of a report's declaration that cases are about; sorted."""
    names = ("features", "modes", "kinds", "dtypes", "kv_dtypes", "kv_layouts")
    return sorted(f"{name}.{value}" for name in names for value in report.spec.get(name, ()))


def markdown(report: Report) -> str:
    """Return the report as Markdown."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# Conformance of `{report.backend}` on {report.device}"
    yield ""
    yield f"Profile `{report.profile}`, shard {report.shard}; " + ", ".join(
        f"{k} {v}" for k, v in report.versions.items()
    )
    yield ""
    yield "| axis | proven | refused | failed | waived | not run | seconds |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for title, counts, seconds in axis_rows(report):
        cells = [str(counts[status]) for status in _ORDER]
        yield f"| {title} | {' | '.join(cells)} | {seconds:.1f} |"
    yield ""
    yield "## Declared"
    yield ""
    yield "| declared | standing | proven | failed | waived |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for word, standing in standings(report).items():
        counts = standing.counts
        row = f"{counts[Status.PROVEN]} | {counts[Status.FAILED]} | {counts[Status.WAIVED]}"
        yield f"| `{word}` | {standing.word} | {row} |"
    yield from _section("Failed", report, Status.FAILED)
    yield from _section("Waived by the vendor", report, Status.WAIVED)
    yield from _section("Not run", report, Status.NOT_RUN)
    yield from _section("Refused, as not declared", report, Status.REFUSED)


_ORDER = (Status.PROVEN, Status.REFUSED, Status.FAILED, Status.WAIVED, Status.NOT_RUN)


def axis_rows(report: Report) -> Iterator[tuple[str, Counter[Status], float]]:
    """Yield each axis's title with its counts and seconds, and the total."""
    total: Counter[Status] = Counter()
    for letter in dict.fromkeys(result.axis for result in report.results):
        mine = [result for result in report.results if result.axis == letter]
        counts = Counter(result.status for result in mine)
        total += counts
        yield axis_title(letter), counts, sum(result.seconds for result in mine)
    yield "all", total, sum(result.seconds for result in report.results)


def axis_title(letter: str) -> str:
    """Return an axis with its title, as 'A semantics'."""
    from .axes import AXES

    return f"{letter} {AXES[letter].title}" if letter in AXES else letter


def _section(title: str, report: Report, status: Status) -> Iterator[str]:
    rows = [result for result in report.results if result.status is status]
    if not rows:
        return
    yield ""
    yield f"## {title}"
    yield ""
    for result in rows[:MOST]:
        yield f"- `{result.case}`: {_told(result)}"
    if len(rows) > MOST:
        yield f"- and {len(rows) - MOST} more"


def _told(result: Result) -> str:
    fault = f"**{result.fault}**: " if result.fault else ""
    return fault + result.message.replace("\n", " ")


def summary(report: Report) -> str:
    """Return the counts in one line."""
    words = [f"{report.count(status)} {status.value.replace('_', ' ')}" for status in _ORDER if report.count(status)]
    return f"{report.backend} on {report.device}, profile {report.profile}, shard {report.shard}: {', '.join(words)}"


def failure_text(name: str, result: Result) -> str:
    """Return a failure for a reader: the claim, what was found, and the one line that runs it again."""
    fault = f" [{result.fault}]" if result.fault else ""
    return (
        f"{result.status.value}{fault}: {result.claim}\n  found: {result.message}\n"
        f"  reproduce: attnplug conformance {name} --case '{result.smallest or result.case}'"
    )
