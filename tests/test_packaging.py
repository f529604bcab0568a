"""Every distribution builds, holds what it must, and works installed from its wheel."""

from __future__ import annotations

import configparser
import email
import json
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from workspace import BACKENDS, CORE, DISTRIBUTIONS, ROOT, Distribution

each_distribution = pytest.mark.parametrize("dist", DISTRIBUTIONS, ids=str)
packaging = pytest.mark.packaging


def run(*command, cwd=None, env=None):
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """(wheel, sdist) of each distribution; the wheel is built from the sdist, so the sdist is complete."""
    out = tmp_path_factory.mktemp("dist")

    def build(dist: Distribution) -> tuple[Path, Path]:
        stem = f"{dist.package}-{dist.version}"
        wheel, sdist = out / f"{stem}-py3-none-any.whl", out / f"{stem}.tar.gz"
        if not wheel.exists():
            run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, dist.folder)
        return wheel, sdist

    return build


@pytest.fixture(scope="session")
def wheel_env(tmp_path_factory, built):
    """Make a virtual environment with some of our wheels and this one's other packages, but none of ours from here.

    The others are linked, not installed: torch alone would take a minute and a gigabyte.
    """
    ours = re.compile(r"_*(editable_+.*_)?attnplug|attnplug_", re.IGNORECASE)
    site = Path(sysconfig.get_path("purelib"))
    made: dict[tuple[str, ...], Path] = {}

    def make(*dists: Distribution) -> Path:
        key = tuple(dist.name for dist in dists)
        if key in made:
            return made[key]
        root = tmp_path_factory.mktemp("venv")
        venv.EnvBuilder(symlinks=True, with_pip=False).create(root)
        python = root / "bin" / "python"
        target = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        for item in site.iterdir():
            if not ours.match(item.name):
                (target / item.name).symlink_to(item)
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
        run(*pip, "install", "-q", "--no-deps", "--no-index", *(built(dist)[0] for dist in dists))
        made[key] = python
        return python

    return make


@each_distribution
def test_the_changelogs_top_entry_is_the_version(dist):
    changelog = (dist.folder / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = re.findall(r"^## \[?([0-9][^\s\]]*)", changelog, flags=re.MULTILINE)
    assert entries[:1] == [dist.version]


@each_distribution
def test_a_distribution_has_the_files_that_its_readers_look_for(dist):
    missing = [name for name in ("README.md", "CHANGELOG.md", "LICENSE", "tests") if not (dist.folder / name).exists()]
    assert missing == []
    assert (dist.folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("dist", DISTRIBUTIONS[1:], ids=str)
def test_every_distribution_depends_on_a_range_of_the_core_that_has_this_core(dist):
    from packaging.requirements import Requirement

    (core,) = [one for one in map(Requirement, dist.project["dependencies"]) if one.name == "attnplug"]
    assert core.specifier.contains(CORE.version, prereleases=True)
    major = int(CORE.version.split(".")[0])
    assert not core.specifier.contains(f"{major + 1}.0"), "a next major may change the contract"


@packaging
@each_distribution
def test_a_wheel_holds_the_package_its_types_and_its_licence_and_nothing_else(dist, built):
    wheel, _ = built(dist)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"{dist.package}-{dist.version}.dist-info"
    assert {name.split("/")[0] for name in names} == {dist.package, info}
    assert f"{dist.package}/py.typed" in names
    assert f"{info}/licenses/LICENSE" in names
    on_disk = {
        path.relative_to(dist.folder / "src").as_posix()
        for path in dist.source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert on_disk == {name for name in names if name.startswith(f"{dist.package}/")}


@packaging
@each_distribution
def test_a_wheels_metadata_says_what_pyproject_says(dist, built):
    wheel, _ = built(dist)
    info = f"{dist.package}-{dist.version}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_string(archive.read(f"{info}/METADATA").decode())
        points = configparser.ConfigParser(delimiters="=")
        points.optionxform = str
        if dist.entry_points:
            points.read_string(archive.read(f"{info}/entry_points.txt").decode())
    assert (metadata["Name"], metadata["Version"]) == (dist.name, dist.version)
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", ">=3.10")
    assert metadata.get_payload().strip() == (dist.folder / "README.md").read_text(encoding="utf-8").strip()
    assert {group: dict(points[group]) for group in points.sections()} == dist.entry_points


@packaging
@each_distribution
def test_an_sdist_brings_its_tests_and_its_changelog(dist, built):
    _, sdist = built(dist)
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"} <= inside
    assert any(name.startswith("tests/test_") for name in inside)


@packaging
def test_the_core_alone_lists_nothing_and_says_how_to_get_a_backend(wheel_env, tmp_path):
    python = wheel_env(CORE)
    assert json.loads(run(python.parent / "attnplug", "list", "--json", cwd=tmp_path)) == []
    asked = subprocess.run(
        [python.parent / "attnplug", "resolve", "--prefill", "torch_native", "--decode", "torch_native"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert asked.returncode == 2
    assert "pip install attnplug-torch-native" in asked.stderr
    assert "Traceback" not in asked.stdout + asked.stderr


@packaging
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_a_backend_is_discovered_from_its_wheel(backend, wheel_env, tmp_path):
    python = wheel_env(CORE, backend)
    rows = json.loads(run(python.parent / "attnplug", "list", "--json", cwd=tmp_path))
    (names,) = [points for group, points in backend.entry_points.items() if group.startswith("attnplug.specs.")]
    assert {row["name"] for row in rows} == set(names)
    for row in rows:
        assert (row["distribution"], row["version"]) == (backend.name, backend.version)
        assert row["state"] in ("DESCRIBED", "MISSING_KERNEL"), row["reasons"]


@packaging
def test_every_module_of_every_wheel_comes_from_the_wheel(wheel_env, tmp_path):
    python = wheel_env(*DISTRIBUTIONS)
    code = (
        "import importlib, json, sys\n"
        "print(json.dumps([importlib.import_module(name).__file__ for name in sys.argv[1:]]))"
    )
    files = json.loads(run(python, "-c", code, *(dist.package for dist in DISTRIBUTIONS), cwd=tmp_path))
    outside = [file for file in files if not Path(file).is_relative_to(python.parent.parent)]
    assert outside == []


@packaging
def test_the_discovery_tests_pass_on_the_installed_wheels(wheel_env, tmp_path):
    python = wheel_env(*DISTRIBUTIONS)
    tests = tmp_path / "tests"
    tests.mkdir()
    for path in (CORE.folder / "tests").glob("*.py"):
        (tests / path.name).write_bytes(path.read_bytes())
    config = ("-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-p", "no:cacheprovider")
    names = [tests / name for name in DISCOVERY_TESTS]
    report = run(python, "-m", "pytest", "-q", *config, *names, cwd=tmp_path)
    assert re.search(r"\d+ passed", report), report


DISCOVERY_TESTS = ("test_catalog.py",)
"""Tests of the core that ask what is installed: those are what a wheel could break."""
