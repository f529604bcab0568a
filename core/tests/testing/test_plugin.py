"""``pytest --pyargs attnplug.testing`` from any folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .fake_backends import SHORT, install, run

SUITE = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "attnplug.testing")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    install(folder, "right")
    install(folder, "short", SHORT)
    return folder


def test_a_backend_is_judged_case_by_case(root: Path, tmp_path: Path) -> None:
    done = run(root, *SUITE, "--attn-backend", "right", "--attn-axes", "JL", "--attn-report", "r.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["counts"]["failed"] == 0
    assert f"{report['counts']['proven'] + report['counts']['refused']} passed" in done.stdout


def test_a_failed_case_says_the_fault_and_is_run_again_by_its_id(root: Path, tmp_path: Path) -> None:
    done = run(root, *SUITE, "--attn-backend", "short", "--attn-axes", "A", "-x", cwd=tmp_path)
    assert done.returncode == 1
    assert "[window off by one]" in done.stdout
    case = done.stdout.split("--case '")[1].split("'")[0]
    again = run(root, *SUITE, "--attn-backend", "short", "--attn-case", case, cwd=tmp_path)
    assert again.returncode == 1
    assert "1 failed" in again.stdout


def test_a_report_is_gone_on_with(root: Path, tmp_path: Path) -> None:
    arguments = ("--attn-backend", "short", "--attn-axes", "A", "--attn-shard", "2/4", "--attn-report", "r.json")
    first = run(root, *SUITE, *arguments, cwd=tmp_path)
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["shard"] == "2/4"
    for result in report["results"]:
        result.update(status="proven", message="from the earlier run", fault="")
    (tmp_path / "r.json").write_text(json.dumps(report))
    assert first.returncode == 1
    assert run(root, *SUITE, *arguments, cwd=tmp_path).returncode == 0


def test_waived_cases_are_expected_to_fail_and_shown(root: Path, tmp_path: Path) -> None:
    waive = ("--attn-waive", "A:window_edge:*=a model's window")
    done = run(root, *SUITE, "--attn-backend", "short", "--attn-axes", "A", *waive, "-rx", cwd=tmp_path)
    assert "xfailed" in done.stdout
    assert "waived by the vendor: a model's window" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give --attn-backend NAME"),
        (("--attn-backend", "nobody"), "no installed distribution announces a backend 'nobody'"),
        (("--attn-backend", "right", "--attn-device", "cuda"), "cuda"),
        (("--attn-backend", "right", "--attn-shard", "0/3"), "shard '0/3'"),
    ],
    ids=["no_backend", "unknown_backend", "unknown_device", "no_shard"],
)
def test_what_is_missing_is_a_usage_error(root: Path, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = run(root, *SUITE, *arguments, cwd=tmp_path)
    assert done.returncode not in (0, 1, 5)
    assert said in done.stdout + done.stderr


def test_the_plugin_that_every_pytest_run_imports_is_light(root: Path, tmp_path: Path) -> None:
    heavy = "('torch', 'pydantic', 'hypothesis')"
    code = f"import sys, attnplug.testing.plugin; print([m for m in {heavy} if m in sys.modules])"
    assert run(root, "-c", code, cwd=tmp_path).stdout.strip() == "[]"
