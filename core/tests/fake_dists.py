"""Fake installed distributions on ``sys.path``: a ``*.dist-info`` folder and the modules that its entry points name."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

SPEC = """
from attnplug.spec import BackendSpec
SPEC = BackendSpec(name={name!r}, device_types=frozenset({{"cpu"}}), dtypes=frozenset({{"float32", "bfloat16"}}),
                   kv_dtypes=frozenset({{"float32", "bfloat16"}}){more})
"""
PLUGIN = """
from attnplug.hookspecs import hookimpl

@hookimpl
def attnplug_create_backend(name, env, options):
    from attnplug.backend import AttentionBackend
    class Fake(AttentionBackend):
        def __init__(self):
            self.made_by, self.options = __name__, options
    return Fake()
"""


class FakeDists:
    """Writes distributions into one folder of ``sys.path``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def dist(
        self,
        name: str,
        *,
        version: str = "1.0",
        entry_points: Mapping[str, Mapping[str, str]] | None = None,
        modules: Mapping[str, str] | None = None,
        requires: tuple[str, ...] = (),
        root: Path | None = None,
    ) -> None:
        """Write a distribution's metadata and modules."""
        root = root or self.root
        info = root / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "Provides-Extra: kernel"]
        lines += [f"Requires-Dist: {text}" for text in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        groups = [
            f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
            for group, points in (entry_points or {}).items()
        ]
        if groups:
            (info / "entry_points.txt").write_text("\n".join(groups))
        for module, source in (modules or {}).items():
            (root / f"{module}.py").write_text(textwrap.dedent(source))

    def backend(
        self,
        name: str,
        *,
        dist: str | None = None,
        more: str = "",
        spec: str | None = None,
        plugin: str = PLUGIN,
        version: str = "1.0",
        groups: tuple[str, ...] = ("attnplug.specs.v1", "attnplug.backends.v1"),
        requires: tuple[str, ...] = (),
    ) -> None:
        """Write a distribution with one backend; ``more`` are further arguments of its spec."""
        dist = dist or f"fake-{name}"
        module = dist.replace("-", "_").replace(".", "_")
        source = SPEC.format(name=name, more=f", {more}" if more else "") if spec is None else spec
        values = {"specs": f"{module}_spec:SPEC", "backends": f"{module}_plugin"}
        self.dist(
            dist,
            version=version,
            entry_points={group: {name: values[group.split(".")[1]]} for group in groups},
            modules={f"{module}_spec": source, f"{module}_plugin": plugin},
            requires=requires,
        )

    def modules(self) -> Iterator[str]:
        """Return the names of the modules written, to be forgotten after a test."""
        return (file.stem for file in self.root.glob("*.py"))
