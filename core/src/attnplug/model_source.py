"""From a path to a ModelSpec, through the engines that can read one (group ``attnplug.model_specs.v1``)."""

from __future__ import annotations

from pathlib import Path

from . import known
from ._metadata import MODEL_SPECS_GROUP, Scan, scan
from .errors import AttnplugError, UnsupportedModel
from .model_spec import ModelSpec


def load_model_spec(path: str, installed: Scan | None = None) -> ModelSpec:
    """Return what a model asks of attention, without loading its weights.

    An entry point of the group names a callable ``(path: str) -> ModelSpec | None``; None: not a kind that it reads.

    Args:
        path: A checkpoint's folder or file, or a name that an engine knows.
        installed: Installed metadata; the process's scan by default.

    Raises:
        UnsupportedModel: Nothing of that name is there, no installed engine reads it, or one that should fails to.
    """
    if not path:
        raise UnsupportedModel("the model's path is empty", remedy="give a folder, a file, or a name: --model PATH")
    readers = (installed or scan()).group(MODEL_SPECS_GROUP)
    failures = []
    for reader in readers:
        try:
            spec = reader.entry_point.load()(path)
        except AttnplugError:
            raise
        # Foreign code: one engine's reader that fails must not hide another's answer, and is told if none answers.
        except Exception as error:
            failures.append(f"{reader.name} ({reader.dist}): {type(error).__name__}: {error}")
            continue
        if isinstance(spec, ModelSpec):
            return spec
        if spec is not None:
            failures.append(f"{reader.name} ({reader.dist}): returned a {type(spec).__name__}, not a ModelSpec")
    # Asked last: an engine may know names that are no paths, such as models that packages bring.
    if not Path(path).exists() and readers and not failures:
        raise UnsupportedModel(
            f"{path!r} is no path that exists, and no name that an installed engine knows",
            remedy="give the folder of config.json and the weights, or a GGUF file",
        )
    names = ", ".join(f"{reader.name} ({reader.dist})" for reader in readers) or "none"
    raise UnsupportedModel(
        "\n  ".join([f"no installed engine reads the model at {path}; engines: {names}", *failures]),
        remedy="" if readers else known.install_command("generate"),
    )
