"""Who imports what, across distributions: read from sources, so that a platform without a library is checked too."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from workspace import BACKENDS, DISTRIBUTIONS, ROOT

KERNEL_LIBRARIES = {
    "cutlass",
    "fla",
    "flash_attn",
    "flash_attn_interface",
    "flash_mla",
    "flashinfer",
    "sgl_kernel",
    "triton",
    "vllm_flash_attn",
}
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".cfg", ".j2", ""}


def imported(path: Path) -> set[str]:
    """Return the absolute modules that a file imports, inside functions too, relative ones as ``.name``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


def top(module: str) -> str:
    return module.split(".")[0]


def tracked_files():
    folders = ("core", "plugins", "engines", "docs", "tests", "benchmarks", "demo", ".ci")
    ignored = {"__pycache__", ".hypothesis", ".pytest_cache", "dist", "build"}
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")] + list(ROOT.glob("*"))
    for path in paths:
        if path.is_file() and not ignored & set(path.parts) and path.suffix in TEXT_SUFFIXES:
            yield path


def test_a_kernel_library_is_imported_in_one_distributions_kernel_files_and_nowhere_else():
    users: dict[str, set[str]] = {}
    outside = []
    for dist in DISTRIBUTIONS:
        for path in dist.source.rglob("*.py"):
            for library in KERNEL_LIBRARIES & {top(module) for module in imported(path)}:
                users.setdefault(library, set()).add(dist.name)
                # Templates are a vendor's files, and the graph lint may look at triton's launches by name.
                if "kernels" not in path.relative_to(dist.source).parts:
                    outside.append(f"{path.relative_to(ROOT)} imports {library}")
    assert outside == []
    # Triton is a language as much as a library: plugins may each have kernels of their own in it.
    shared = {library: names for library, names in users.items() if len(names) > 1 and library != "triton"}
    assert shared == {}


@pytest.mark.parametrize("dist", BACKENDS, ids=str)
def test_a_plugins_package_holds_only_a_docstring(dist):
    (only,) = ast.parse((dist.source / "__init__.py").read_text(encoding="utf-8")).body
    assert isinstance(only, ast.Expr)
    assert isinstance(only.value, ast.Constant)
    assert isinstance(only.value.value, str)


@pytest.mark.parametrize("dist", BACKENDS, ids=str)
def test_a_spec_imports_only_the_cores_specs_and_the_standard_library(dist):
    modules = imported(dist.source / "spec.py")
    assert "attnplug.spec" in modules
    assert {module for module in modules if top(module) not in sys.stdlib_module_names} == {"attnplug.spec"}


@pytest.mark.parametrize("dist", BACKENDS, ids=str)
def test_a_plugin_has_the_five_files_that_every_plugin_has(dist):
    names = {path.name for path in dist.source.iterdir()}
    assert {"__init__.py", "spec.py", "plugin.py", "options.py", "backend.py"} <= names


@pytest.mark.parametrize("dist", BACKENDS, ids=str)
def test_kernel_files_know_no_batch(dist):
    knowing = [
        str(path.relative_to(ROOT))
        for path in (dist.source / "kernels").rglob("*.py")
        if any(module.startswith("attnplug.batch") for module in imported(path))
    ]
    assert knowing == []


def test_no_distribution_imports_another_but_the_core():
    names = {dist.package for dist in DISTRIBUTIONS} - {"attnplug"}
    crossing = [
        f"{path.relative_to(ROOT)} imports {module}"
        for dist in DISTRIBUTIONS
        for path in dist.source.rglob("*.py")
        for module in imported(path)
        if top(module) in names - {dist.package}
    ]
    assert crossing == []


def test_modules_stay_small_enough_to_read():
    long = [
        f"{path.relative_to(ROOT)}: {lines} lines"
        for dist in DISTRIBUTIONS
        for path in dist.source.rglob("*.py")
        if "kernels" not in path.relative_to(dist.source).parts
        and (lines := len(path.read_text(encoding="utf-8").splitlines())) > 300
    ]
    assert long == [], "at most 300 lines a module: one concept a file"


def test_no_text_points_outside_the_repository():
    # Spelled in parts, so that this file is not its own finding.
    outside = re.compile("|".join((r"\.\./" + "shared", "/" + "work/", "~/" + "work")))
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked_files()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if outside.search(line)
    ]
    assert found == []


def test_no_test_module_hides_another_of_the_same_name():
    # core/tests is a package named "tests" to pytest, and so is the folder of this file: one name, one module.
    names = [path.name for folder in (ROOT / "core" / "tests", ROOT / "tests") for path in folder.glob("*.py")]
    assert sorted(set(names)) == sorted(names)
