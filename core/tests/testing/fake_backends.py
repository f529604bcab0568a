"""Distributions made of files, whose backends are the dense one with a fault: for tests that start processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

_SPEC = """
import dataclasses
from attnplug.spec import BackendSpec, Feature, ForwardMode, Kind, Phase
{extra_import}
SPEC = BackendSpec(
    name={name!r}, kinds=frozenset({{Kind.SOFTMAX}}), device_types=frozenset({{"cpu"}}), phases=frozenset(Phase),
    modes=frozenset({{ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.IDLE}}),
    dtypes=frozenset({{"float32"}}), kv_dtypes=frozenset({{"float32"}}), features=frozenset({{Feature.SLIDING_WINDOW}}),
)
"""
_PLUGIN = """
import os, signal, time
from attnplug.hookspecs import hookimpl

@hookimpl
def attnplug_create_backend(name, env, options):
    from dense_backend import DenseBackend
    from {module}.spec import SPEC

    class Backend(DenseBackend):
        def window(self, q_pos, k_pos, size, *, causal):
            {window}
            return super().window(q_pos, k_pos, size, causal=causal)

    return Backend(env, SPEC) if name == SPEC.name else None
"""
CRASHES = "if size == 3: os.kill(os.getpid(), signal.SIGSEGV)"
EXITS = "if size == 3: os._exit(7)"
HANGS = "if size == 3: time.sleep(600)"
SHORT = "size -= 1"
RIGHT = "pass"


def install(root: Path, name: str, window: str = RIGHT, *, extra_import: str = "") -> None:
    """Write a distribution into a folder that is to be on the path."""
    module = f"fake_{name}"
    package, info = root / module, root / f"{module}-1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("")
    (package / "spec.py").write_text(_SPEC.format(name=name, extra_import=extra_import))
    (package / "plugin.py").write_text(_PLUGIN.format(module=module, window=window))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    points = f"[attnplug.specs.v1]\n{name} = {module}.spec:SPEC\n[attnplug.backends.v1]\n{name} = {module}.plugin\n"
    (info / "entry_points.txt").write_text(points)
    shutil.copy(Path(__file__).with_name("dense_backend.py"), root / "dense_backend.py")


def run(root: Path, *arguments: str, cwd: Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run Python with the folder on the path, from another folder."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ATTNPLUG_", "PYTEST_"))}
    env |= {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)
