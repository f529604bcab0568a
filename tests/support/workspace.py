"""The distributions of this workspace, as their files say."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Distribution:
    """One distribution's folder and its ``[project]`` table."""

    folder: Path
    project: dict[str, Any]

    @property
    def name(self) -> str:
        return self.project["name"]

    @property
    def version(self) -> str:
        return self.project["version"]

    @property
    def package(self) -> str:
        """The import name."""
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        """The folder of the import package."""
        return self.folder / "src" / self.package

    @property
    def entry_points(self) -> dict[str, dict[str, str]]:
        scripts = {"console_scripts": self.project["scripts"]} if "scripts" in self.project else {}
        return {**scripts, **self.project.get("entry-points", {})}

    @property
    def is_backend(self) -> bool:
        """Whether it announces an attention backend."""
        return any(group.startswith("attnplug.backends.") for group in self.entry_points)

    def __str__(self) -> str:
        return self.name


def _read(pyproject: Path) -> Distribution:
    return Distribution(pyproject.parent, tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"])


DISTRIBUTIONS = tuple(
    _read(pyproject)
    for pattern in ("core", "plugins/*", "engines/*")
    for pyproject in sorted(ROOT.glob(f"{pattern}/pyproject.toml"))
)
CORE = DISTRIBUTIONS[0]
BACKENDS = tuple(one for one in DISTRIBUTIONS if one.is_backend)
