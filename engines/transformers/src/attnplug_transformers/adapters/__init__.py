"""Adapters, one a file; a family names the one that serves its models by ``module:attribute``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from attnplug.admission import words
from attnplug.errors import UnsupportedModel

from ..families import DECODER, find_family

if TYPE_CHECKING:
    from attnplug.model_spec import ModelSpec

    from .base import Adapter

__all__ = ["find_adapter"]


def find_adapter(model_type: str, spec: ModelSpec) -> Adapter:
    """Return the adapter of an architecture; without a family it is that of decoders.

    Args:
        model_type: The config's.
        spec: What was read of it.

    Raises:
        UnsupportedModel: The family's adapter cannot be imported, is none, or does not serve the kinds of the layers.
    """
    from .base import Adapter

    family = find_family(model_type)
    reference = DECODER if family is None else family.adapter
    owner = "" if family is None else f" of family {family.name!r}"
    module, _, attribute = reference.partition(":")
    try:
        adapter = getattr(import_module(module), attribute)
        made = adapter() if isinstance(adapter, type) else adapter
    # Foreign code: whatever it raises is raised again with the family's name on it.
    except Exception as error:
        raise UnsupportedModel(
            f"adapter {reference!r}{owner} failed to load: {type(error).__name__}: {error}",
            remedy="name it as 'package.module:Class', in a distribution that is installed",
        ) from error
    if not isinstance(made, Adapter):
        raise UnsupportedModel(
            f"adapter {reference!r}{owner} is {made!r}; allowed: an attnplug_transformers.adapters.base.Adapter",
            remedy="derive it from Adapter",
        )
    foreign = spec.kinds - made.kinds
    if foreign:
        raise UnsupportedModel(
            f"{spec.name} has {words(foreign)} layers; adapter {reference!r}{owner} serves {words(made.kinds)}",
            remedy="name an adapter in its family that serves them (see docs/models.md)",
        )
    return made
