"""``make demo`` and ``make test`` on a stranger's machine: what they would do, and what they say when they cannot."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from workspace import DISTRIBUTIONS, ROOT


@pytest.fixture
def clone(tmp_path):
    """A copy of what the Makefile reads, in which no environment was made yet."""
    for name in ("Makefile", "constraints.txt", "requirements-dev.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for dist in DISTRIBUTIONS:
        target = tmp_path / dist.folder.relative_to(ROOT)
        target.mkdir(parents=True)
        shutil.copy(dist.folder / "pyproject.toml", target)
    return tmp_path


def make(folder, *arguments):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(["make", *arguments], cwd=folder, env=clean, capture_output=True, text=True, timeout=60)


def dry_run(folder, *arguments):
    done = make(folder, "-n", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("target", ["demo", "test", "lint", "bench"])
def test_a_missing_environment_is_made_and_every_distribution_installed_in_it(clone, target):
    commands = dry_run(clone, target)
    assert "-m venv .venv" in commands
    (install,) = [line for line in commands.splitlines() if "-e core" in line]
    editable = {os.path.normpath(path.partition("[")[0]) for path in re.findall(r"-e (\S+)", install)}
    assert editable == {str(dist.folder.relative_to(ROOT)) for dist in DISTRIBUTIONS}
    assert "-c constraints.txt" in install


def test_an_environment_that_is_up_to_date_is_left_alone_until_a_pyproject_changes(clone):
    venv = clone / ".venv"
    venv.mkdir()
    for name in ("pyvenv.cfg", ".installed", ".installed-dev"):
        (venv / name).touch()
    assert " pip " not in dry_run(clone, "demo", "test", "lint")
    later = (venv / ".installed-dev").stat().st_mtime + 10
    os.utime(clone / "core" / "pyproject.toml", (later, later))
    assert "-e core" in dry_run(clone, "demo")


def test_an_old_python_is_refused_with_a_remedy_before_anything_is_made(clone):
    old = clone / "python3.8"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.8.1"\n[ "$1" = --version ]\n')
    old.chmod(0o755)
    done = make(clone, "demo", f"PYTHON={old}")
    assert done.returncode == 2
    assert "attnplug needs Python 3.10 or newer" in done.stderr
    assert "Python 3.8.1" in done.stderr
    assert "remedy: make demo PYTHON=python3.11" in done.stderr
    assert not (clone / ".venv").exists()


def test_the_demo_names_real_options_and_a_valid_configuration():
    (demo,) = [line for line in dry_run(ROOT, "demo").replace("\\\n", " ").splitlines() if "attnplug generate" in line]
    program = os.path.join(os.path.dirname(sys.executable), "attnplug")
    told = subprocess.run(
        [program, "generate", "--help"],
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    options = set(re.findall(r" (--[\w-]+)", re.sub(r'"[^"]*"', "", demo)))
    assert "--verify" in options
    assert {option for option in options if option not in told.stdout} == set()
    checked = subprocess.run([program, "validate", "demo/attn.toml"], cwd=ROOT, capture_output=True, timeout=120)
    assert checked.returncode == 0, checked.stderr


def test_ci_does_what_a_developer_does():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "\nmake test\n" in script
    assert "\nmake lint\n" in script


def test_every_direct_dependency_is_pinned():
    pinned = {
        Requirement(line).name.lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    }
    ours = {dist.name for dist in DISTRIBUTIONS}
    asked = [text for dist in DISTRIBUTIONS for text in dist.project["dependencies"]]
    asked += [
        line for line in (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines() if line[0] != "#"
    ]
    names = {one.name.lower() for one in map(Requirement, asked) if one.marker is None or one.marker.evaluate()}
    assert names - ours - pinned == set()
