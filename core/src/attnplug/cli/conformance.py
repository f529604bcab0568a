"""``attnplug conformance``: what a backend declared, what of it is proven, what it refuses, and what fails."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError
from .options import Json
from .output import print_json, print_table

if TYPE_CHECKING:
    from ..testing.results import Report, Result

app = typer.Typer(add_completion=False)
FAILED = 1


@app.command()
def command(
    name: Annotated[str, typer.Argument(help="An installed backend.")],
    device: Annotated[str, typer.Option("--device", help="Where it runs, such as cpu or cuda:0.")] = "",
    profile: Annotated[str, typer.Option("--profile", help="quick, gpu or full.")] = "quick",
    axes: Annotated[str, typer.Option("--axes", help="Letters of the axes to run, as ABH; all by default.")] = "",
    shard: Annotated[str, typer.Option("--shard", help="i/n: every n-th case from the i-th on.")] = "1/1",
    case: Annotated[str, typer.Option("--case", help="One case, by the id that a failure printed.")] = "",
    report: Annotated[
        Path | None, typer.Option("--report", help="JSON to write; an existing one is gone on with.")
    ] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Markdown to write.")] = None,
    waive: Annotated[
        list[str] | None, typer.Option("--waive", help="PATTERN=WHY: a case that will fail; the report says so.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Prove what a backend declares, in a process of its own."""
    from ..catalog import Catalog
    from ..device import describe_device
    from ..testing.isolate import Job, run_apart
    from ..testing.options import parse_axes, parse_profile, parse_shard, parse_waivers
    from ..testing.report import markdown as as_markdown

    entry = Catalog().require(name)
    if device:
        describe_device(device)
    job = Job(
        backend=entry.name,
        device=device,
        profile=parse_profile(profile),
        shard=parse_shard(shard),
        axes=parse_axes(axes),
        case=case,
        waivers=parse_waivers(waive or ()),
    )
    if case and report is not None:
        raise ConfigError("--case runs one case, and --report is of a whole run", key="report", remedy="leave one out")
    show = _Progress(quiet=as_json)
    found = run_apart(job, report_path=report, on_result=show.take)
    show.close()
    if markdown is not None:
        markdown.write_text(as_markdown(found), encoding="utf-8")
    if as_json:
        print_json(found.as_dict())
    else:
        _print(found, whole=not case)
    if not found.ok:
        raise typer.Exit(FAILED)


class _Progress:
    """One line on a terminal that is written over; failures as they come, where a reader can see them early."""

    def __init__(self, *, quiet: bool) -> None:
        self._live = sys.stderr.isatty() and not quiet
        self._count = 0

    def take(self, result: Result) -> None:
        """Show one more result."""
        self._count += 1
        if self._live:
            print(f"\r\x1b[K{self._count} cases, {result.case[:100]}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Give the line back."""
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _print(report: Report, *, whole: bool) -> None:
    from ..testing.report import axis_rows, failure_text, standings, summary
    from ..testing.results import Status

    rows = [
        (title, *(str(counts[one]) for one in Status), f"{seconds:.1f}") for title, counts, seconds in axis_rows(report)
    ]
    print_table(("AXIS", *(one.value.upper() for one in Status), "SECONDS"), rows)
    words = standings(report) if whole else {}
    loose = {word: standing.word for word, standing in words.items() if standing.word != "proven"}
    if whole:
        print(f"\ndeclared: {len(words)} words, {len(words) - len(loose)} proven")
    for word, standing in loose.items():
        print(f"  {word}: {standing}")
    for status in (Status.WAIVED, Status.NOT_RUN):
        for result in report.results:
            if result.status is status:
                print(f"{status.value}: {result.case}: {result.message}")
    for result in report.failures:
        print(f"\n{failure_text(report.backend, result)}")
    print(f"\n{summary(report)}")
