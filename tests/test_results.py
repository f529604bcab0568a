"""What the documents quote is what a committed result says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def rows(document: str, header: str) -> list[list[str]]:
    """The cells of the table whose header begins so, without the separator."""
    lines = (ROOT / document).read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(header))
    table = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def read(name: str) -> dict:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def test_the_tokens_a_second_of_graphs_are_those_of_one_run() -> None:
    found = read("graphs_gpu.json")
    assert found["card"] == "NVIDIA H200"
    assert found["errors"] == []
    quoted = {way: counts for way, *counts in (unescape(row) for row in rows("docs/graphs.md", "| way |"))}
    measured = {
        way: [f"{found['results_by_batch'][batch][way]['tokens_per_second']:.0f}" for batch in ("1", "8", "32")]
        for way in found["results_by_batch"]["1"]
    }
    assert quoted == measured
    assert all(one["within_the_rule"] for one in found["check_at_batch_8"].values())


def unescape(row: list[str]) -> list[str]:
    """Join what an escaped bar inside a cell has cut."""
    joined: list[str] = []
    for cell in row:
        if joined and joined[-1].endswith("\\"):
            joined[-1] = joined[-1][:-1] + "|" + cell
        else:
            joined.append(cell)
    return joined


@pytest.mark.parametrize("profile", ["gpu", "full"])
def test_the_conformance_counts_are_those_of_the_report(profile: str) -> None:
    report = read(f"conformance_torch_native_h200_{profile}.json")
    statuses = list(report["results"].values())
    counted = [str(statuses.count(status)) for status in ("proven", "refused", "failed", "not_run")]
    quoted = next(row for row in rows("docs/conformance.md", "| profile |") if row[0] == f"`{profile}`")
    assert quoted[1:5] == counted
    assert report["counts"] == {status: statuses.count(status) for status in set(statuses)}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_says_of_which_revision_and_where_it_was_measured(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result.get("revision") or all(run["revision"] for run in result["runs"]), "no revision"
    assert any(result.get(key) for key in ("machine", "card", "device")), "no machine"
    assert result.get("versions") or result.get("torch"), "no versions"


def test_the_counts_of_mutants_are_those_of_the_whole_run() -> None:
    found = read("torch_native_mutations.json")
    assert found["survived"] == found["listed_as_equivalent_and_caught"] == []
    assert found["mutants"] == found["killed"] + found["equivalent"]
    text = " ".join((ROOT / "docs/conformance.md").read_text(encoding="utf-8").split())
    assert (
        f"none of {found['mutants']} changes survived; {found['killed']} were caught, and {found['equivalent']} are"
        in text
    )
