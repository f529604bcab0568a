"""Load torch_native with one module changed, beside the real one, and judge it by cases of the conformance suite."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from mutation_sites import Mutant, mutants

import attnplug_torch_native
from attnplug.testing import compare
from attnplug.testing.case import Case
from attnplug.testing.plan import Plan, Profile
from attnplug.testing.results import Status
from attnplug.testing.runner import list_cases, run_case
from attnplug.testing.subject import Subject

PACKAGE = "attnplug_torch_native"
ROOT = Path(attnplug_torch_native.__file__).parent
MUTATED = tuple(
    [
        "kernels.mask",
        "kernels.softmax",
        "kernels.tile",
        "kernels.gather",
        "lanes",
        "metadata",
        "padded",
        "planner",
        "sources",
        "tree",
        "backend",
        "checks",
        "workspace",
    ]
)
"""Modules that hold the mathematics and the plans; of ``checks`` what decides, not what refuses."""
TIGHT: Mapping[str, Mapping[str, int]] = {
    "kernels.softmax": {"KEY_BLOCK": 24},
    "kernels.tile": {"LONG_KEYS": 40},
    "planner": {"SMALL_MASK": 64},
    "padded": {"SMALL_MASK": 64},
    "lanes": {"SHORT_KEYS": 32, "SHORT_QUERIES": 4, "BUCKET": 8},
}
"""Sizes from which long requests are treated otherwise, made small, so that small cases are long."""
TIGHT_OPTIONS = {"max_gather_tokens": 40, "max_score_cells": 200}
MOST = 60
"""Trials that a mutant is given: of those that reach it, evenly spread. What survives them is given all."""


class Loader:
    """Gives the package's modules from code that is at hand, one of them changed."""

    def __init__(self, code: Mapping[str, CodeType]) -> None:
        self._code = code

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self._code:
            return None
        spec = ModuleSpec(name, self, is_package=name in (PACKAGE, f"{PACKAGE}.kernels"))
        spec.origin = str(source_path(name))
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code[module.__name__], module.__dict__)


def source_path(name: str) -> Path:
    """Return a module's file."""
    parts = name.split(".")[1:]
    whole = ROOT.joinpath(*parts)
    return whole / "__init__.py" if whole.is_dir() else whole.with_suffix(".py")


def package_code() -> dict[str, CodeType]:
    """Compile every module of the package."""
    names = [PACKAGE, f"{PACKAGE}.kernels"]
    for file in sorted(ROOT.rglob("*.py")):
        if file.name != "__init__.py":
            names.append(".".join((PACKAGE, *file.relative_to(ROOT).with_suffix("").parts)))
    return {name: compile(source_path(name).read_text(), str(source_path(name)), "exec") for name in names}


@contextmanager
def _apart() -> Iterator[None]:
    """Take the package's modules out of ``sys.modules``, and put them back."""
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == PACKAGE}
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
            del sys.modules[name]
        sys.modules.update(kept)


def load(code: Mapping[str, CodeType], *, tight: bool) -> Subject:
    """Return a backend made of code; ``tight``: with small sizes, so that small cases take the ways of long ones."""
    finder = Loader(code)
    with _apart():
        sys.meta_path.insert(0, finder)
        try:
            made = importlib.import_module(f"{PACKAGE}.backend")
            modules = {name: importlib.import_module(f"{PACKAGE}.{name}") for name in (*TIGHT, "spec", "options")}
        finally:
            sys.meta_path.remove(finder)
    if tight:
        for name, sizes in TIGHT.items():
            for constant, value in sizes.items():
                setattr(modules[name], constant, value)
    make = modules["options"].TorchNativeOptions
    # Smaller than the options allow: a block of queries is then one or two of them.
    options = make.model_construct(**TIGHT_OPTIONS) if tight else make()
    spec = modules["spec"].SPEC
    return Subject(spec.name, spec, lambda env: made.TorchNativeBackend(env, options), torch.device("cpu"))


@dataclass(frozen=True)
class Trial:
    """One case with one set of sizes."""

    case: Case
    tight: bool

    @property
    def id(self) -> str:
        return f"{'tight ' if self.tight else ''}{self.case.id}"


def trials(patterns: Sequence[str], *, extra: Sequence[str] = ()) -> list[Trial]:
    """Return the cases of the quick profile that patterns name, in order, with the usual sizes and with small ones."""
    plan = Plan(Subject.find("torch_native", "cpu"), Profile.QUICK)
    every, found = list_cases(plan), dict[str, Case]()
    for pattern in patterns:
        mine = [case for case in every if fnmatchcase(case.id, pattern)]
        assert mine, f"no case of the quick profile matches {pattern}"
        found |= {case.id: case for case in mine}
    cases = [*found.values(), *(Case.parse(text) for text in extra)]
    # Many heads in blocks of one query cost seconds, and show nothing that few heads do not.
    return [Trial(case, tight) for case in cases for tight in (False, True) if not (tight and case.axis == "K")]


@dataclass(frozen=True)
class Verdict:
    """What came of a mutant."""

    mutant: Mutant
    killed_by: str
    """The trial that failed, empty where all passed."""
    fault: str
    tried: int


class Court:
    """Judges mutants: by the trials whose lines they change, the likeliest first.

    Args:
        of: Trials that the unchanged backend passes.
    """

    def __init__(self, of: Sequence[Trial]) -> None:
        self.code = package_code()
        self.trials = list(of)
        self.lines: dict[Trial, frozenset[tuple[str, int]]] = {}
        self.failures: list[str] = []
        self._killers: dict[str, list[Trial]] = {}

    def rehearse(self) -> None:
        """Run every trial unchanged: it must pass; note which lines it runs."""
        right = {tight: load(self.code, tight=tight) for tight in (False, True)}
        for trial in self.trials:
            with _unnamed(), traced() as seen:
                result = run_case(right[trial.tight], trial.case)
            if result.status not in (Status.PROVEN, Status.REFUSED):
                self.failures.append(f"{trial.id}: {result.message}")
            self.lines[trial] = frozenset(seen)

    def try_one(self, mutant: Mutant, *, thorough: bool = False) -> Verdict:
        """Run trials that reach a mutant until one fails; ``thorough``: all of them."""
        name = f"{PACKAGE}.{mutant.module}"
        try:
            code = {**self.code, name: compile(mutant.tree, str(source_path(name)), "exec")}
            subjects = cache(lambda tight: load(code, tight=tight))
            subjects(True)
        # A mutant that cannot be imported is caught by whatever runs first.
        except Exception as error:
            return Verdict(mutant, "import", f"{type(error).__name__}: {error}", 0)
        reached = self.reaching(mutant)
        known = set(reached)
        first = [trial for trial in reversed(self._killers.get(mutant.module, [])) if trial in known]
        spread = reached[:: -(-len(reached) // MOST)] if reached else []
        order = list(dict.fromkeys([*first, *spread, *(reached if thorough else ())]))
        for count, trial in enumerate(order, 1):
            with _unnamed():
                result = run_case(subjects(trial.tight), trial.case)
            if result.status not in (Status.PROVEN, Status.REFUSED):
                mine = self._killers.setdefault(mutant.module, [])
                if trial in mine:
                    mine.remove(trial)
                mine.append(trial)
                return Verdict(mutant, trial.id, result.fault or result.message[:80], count)
        return Verdict(mutant, "", "", len(order))

    def reaching(self, mutant: Mutant) -> list[Trial]:
        """Return the trials that run a mutant's line; all where it is outside functions."""
        file = str(source_path(f"{PACKAGE}.{mutant.module}"))
        spans = set(range(mutant.line, mutant.line + 1))
        hit = [trial for trial in self.trials if any((file, line) in self.lines[trial] for line in spans)]
        hit = hit or [trial for trial in self.trials if self._runs_scope(trial, file, mutant)]
        # What runs when a module is imported is behind every trial.
        return hit or list(self.trials)

    def _runs_scope(self, trial: Trial, file: str, mutant: Mutant) -> bool:
        """A node inside a statement of several lines has no line event of its own: its neighbours stand for it."""
        near = range(max(1, mutant.line - 12), mutant.line + 1)
        return any((file, line) in self.lines[trial] for line in near)


@contextmanager
def _unnamed() -> Iterator[None]:
    """Leave out the search for a fault's name, which takes longer than the case: that it fails is enough here."""
    kept = compare._match_out
    compare._match_out = lambda *args, **options: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        compare._match_out = kept


@contextmanager
def traced() -> Iterator[set[tuple[str, int]]]:
    """Collect the lines of the package that run."""
    seen: set[tuple[str, int]] = set()
    root = str(ROOT)

    def line(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        return line if frame.f_code.co_filename.startswith(root) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield seen
    finally:
        sys.settrace(before)


def all_mutants() -> list[Mutant]:
    """Return every mutant of the modules that hold the backend's mathematics and plans."""
    every = [m for name in MUTATED for m in mutants(name, source_path(f"{PACKAGE}.{name}").read_text())]
    return [m for m in every if m.module != "checks" or m.scope in ("is_causal", "compute_dtype")]
