"""``attnplug conformance`` on installed backends, of which some are wrong, and some take their process along."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .fake_backends import CRASHES, EXITS, HANGS, SHORT, install, run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    install(folder, "right")
    install(folder, "short", SHORT)
    install(folder, "crashes", CRASHES)
    install(folder, "exits", EXITS)
    install(folder, "hangs", HANGS)
    install(folder, "impure", extra_import="import torch")
    return folder


def conformance(root: Path, tmp_path: Path, *arguments: str) -> tuple[int, str, str]:
    done = run(root, "-m", "attnplug", "conformance", *arguments, cwd=tmp_path)
    return done.returncode, done.stdout, done.stderr


def test_a_right_backend_is_proven_and_its_undeclared_features_are_refused(root: Path, tmp_path: Path) -> None:
    code, out, err = conformance(root, tmp_path, "right", "--axes", "BHJL", "--json", "--markdown", "r.md")
    assert code == 0, out + err
    report = json.loads(out)
    assert report["counts"]["failed"] == 0
    assert report["counts"]["proven"] > 10
    refused = {result["case"].partition(":arg=")[2] for result in report["results"] if result["status"] == "refused"}
    assert {"features.sinks", "features.lse", "kv_dtypes.float8_e4m3fn", "modes.target_verify", "kinds.mla"} <= refused
    text = (tmp_path / "r.md").read_text()
    assert "| `features.sliding_window` | proven |" in text
    assert "## Refused, as not declared" in text


def test_a_failure_names_the_fault_and_the_one_line_that_runs_it_again(root: Path, tmp_path: Path) -> None:
    code, out, _ = conformance(root, tmp_path, "short", "--axes", "A")
    assert code == 1
    assert "failed [window off by one]: a window of w shows a query at p the keys p-w … p, w+1 of them" in out
    line = next(line for line in out.splitlines() if "reproduce: attnplug conformance short --case '" in line)
    case = line.split("'")[1]
    code, out, _ = conformance(root, tmp_path, "short", "--case", case)
    assert code == 1
    assert "window off by one" in out
    assert conformance(root, tmp_path, "right", "--case", case)[0] == 0


@pytest.mark.parametrize(("name", "said"), [("crashes", "SIGSEGV"), ("exits", "exited with 7")])
def test_a_backend_that_ends_its_process_fails_those_cases_only(
    root: Path, tmp_path: Path, name: str, said: str
) -> None:
    code, out, err = conformance(root, tmp_path, name, "--axes", "A", "--shard", "1/4", "--json")
    assert code == 1, err
    results = json.loads(out)["results"]
    failed = [result for result in results if result["status"] == "failed"]
    assert failed
    assert all(",w3:" in result["case"] and result["fault"] == "crashes the process" for result in failed)
    assert all(said in result["message"] for result in failed)
    assert len(failed) == sum(",w3:" in result["case"] for result in results) < len(results)


def test_a_backend_that_hangs_is_ended_and_named(root: Path, tmp_path: Path) -> None:
    code = (
        "from attnplug.testing.isolate import Job, run_apart\n"
        "case = 'A:window_edge:decode:q=1:p=9:float32:4/2x64,w3:page=16'\n"
        "found = run_apart(Job(backend='hangs', case=case, case_seconds=20.0))\n"
        "print(found.results[0].status.value, found.results[0].message)\n"
    )
    done = run(root, "-c", code, cwd=tmp_path)
    assert done.stdout.startswith("failed the process was ended after 20 s without a sign of life"), done.stderr


def test_a_report_is_gone_on_with_and_another_runs_is_refused(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert conformance(root, tmp_path, "right", "--axes", "L", "--report", str(path))[0] == 0
    whole = json.loads(path.read_text())
    # A run that was stopped: half of the results are there, and one of them is marked to be told from a new one.
    half = {**whole, "results": whole["results"][: len(whole["results"]) // 2]}
    half["results"][0]["message"] = "from the earlier run"
    path.write_text(json.dumps(half))
    code, _, err = conformance(root, tmp_path, "right", "--axes", "L", "--report", str(path))
    assert code == 0, err
    again = json.loads(path.read_text())
    assert [one["case"] for one in again["results"]] == [one["case"] for one in whole["results"]]
    assert again["results"][0]["message"] == "from the earlier run"
    # Another axis joins the file; nothing that was found is lost.
    assert conformance(root, tmp_path, "right", "--axes", "J", "--report", str(path))[0] == 0
    both = {one["case"] for one in json.loads(path.read_text())["results"]}
    assert both > {one["case"] for one in whole["results"]}
    assert {case[0] for case in both} == {"L", "J"}
    code, _, err = conformance(root, tmp_path, "right", "--axes", "L", "--report", str(path), "--waive", "L:*=because")
    assert code == 2
    assert "holds another run: waivers" in err
    code, _, err = conformance(root, tmp_path, "short", "--axes", "L", "--report", str(path))
    assert code == 2
    assert "holds another run: backend: right, now short" in err


def test_an_impure_spec_fails_the_contract_axis(root: Path, tmp_path: Path) -> None:
    code, out, _ = conformance(root, tmp_path, "impure", "--axes", "L")
    assert code == 1
    assert "failed [the spec is not pure]" in out
    assert "the spec imports torch" in out


def test_a_waiver_is_said_in_the_open(root: Path, tmp_path: Path) -> None:
    waiver = "A:window_edge:*=our window is a model's, not the contract's"
    code, out, _ = conformance(root, tmp_path, "short", "--axes", "A", "--waive", waiver)
    assert "waived: A:window_edge:" in out
    assert "waived by the vendor: our window is a model's" in out
    assert "failed [window off by one]: a window of w" not in out
    assert code in (0, 1)


MENDABLE = {
    "unknown backend": (("nobody",), "no installed distribution announces a backend 'nobody'"),
    "absent device": (("right", "--device", "cuda:63"), "device 'cuda:63' is not in this machine"),
    "undeclared device": (("right", "--device", "xpu"), "does not run on 'xpu'; allowed: cpu"),
    "no device": (("right", "--device", "teapot!"), "names no device"),
    "unknown profile": (("right", "--profile", "slow"), "profile 'slow' is not known; allowed: quick, gpu, full"),
    "impossible shard": (("right", "--shard", "4/3"), "shard '4/3'"),
    "unknown axis": (("right", "--axes", "Z"), "axis 'Z' is not there"),
    "text that is no case": (("right", "--case", "A:nothing"), "is no conformance case"),
    "unknown check": (("right", "--case", "A:nothing:decode:q=1:p=1:float32:4/2x64"), "there is no check A:nothing"),
    "waiver without a reason": (("right", "--waive", "A:*"), "has no pattern or no reason"),
    "report of one case": (("right", "--case", "x", "--report", "r.json"), "--case runs one case"),
}


@pytest.fixture(scope="module")
def mendable(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and stderr of each, from one process: starting one costs seconds."""
    code = (
        "import contextlib, io, json, sys\n"
        "from attnplug.cli import main\n"
        "found = {}\n"
        "for name, arguments in json.loads(sys.argv[1]).items():\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):\n"
        "        found[name] = main(['conformance', *arguments]), err.getvalue()\n"
        "print(json.dumps(found))\n"
    )
    asked = json.dumps({name: arguments for name, (arguments, _) in MENDABLE.items()})
    done = run(root, "-c", code, asked, cwd=tmp_path_factory.mktemp("cwd"))
    found: dict[str, tuple[int, str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("what", list(MENDABLE))
def test_what_the_user_must_mend_ends_with_two_and_says_what(mendable: dict[str, tuple[int, str]], what: str) -> None:
    code, err = mendable[what]
    assert code == 2
    assert MENDABLE[what][1] in err
    assert "Traceback" not in err


def test_a_file_that_is_no_report_is_refused(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("{}")
    code, _, err = conformance(root, tmp_path, "right", "--axes", "L", "--report", str(path))
    assert code == 2
    assert "is no conformance report" in err
