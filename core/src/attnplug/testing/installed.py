"""Find an installed backend and make it as an engine would: through the catalog and the plugin manager."""

from __future__ import annotations

import torch

from ..assembly.env import BackendEnv
from ..backend import AttentionBackend
from ..device import describe_device
from ..errors import BackendRejected, ConfigError, Reason
from ..manager import BackendManager
from ..request import Role
from .subject import Subject


def find(name: str, device: str | None) -> Subject:
    """Return an installed backend on a device; see ``Subject.find``."""
    manager = BackendManager()
    loaded = manager.load(name)
    spec = loaded.spec
    chosen = device or _first_device(spec.device_types)
    facts = describe_device(chosen)
    if facts.type not in spec.device_types:
        raise ConfigError(
            f"backend {name!r} does not run on {chosen!r}; allowed: {', '.join(sorted(spec.device_types))}",
            key="device",
            value=chosen,
            allowed=", ".join(sorted(spec.device_types)),
            remedy="choose one of its device types",
        )
    if "@" in chosen:
        raise ConfigError(
            f"device {chosen!r} is another machine's; the suite runs kernels",
            key="device",
            value=chosen,
            allowed="a device of this machine, such as 'cpu' or 'cuda:0'",
        )
    reasons = manager.probe(name, facts)
    if reasons:
        raise BackendRejected(
            f"backend {name!r} cannot run on {facts}",
            reasons={name: [Reason("probe", str(facts), text) for text in reasons]},
            remedy="`attnplug doctor` shows what is missing",
        )

    def make(env: BackendEnv) -> AttentionBackend:
        return manager.create_backend(Role.PREFILL, loaded.name, env)

    index = "" if facts.index is None else f":{facts.index}"
    where, made_by = torch.device(facts.type + index), loaded.entry.dist
    return Subject(loaded.name, spec, make, where, installed=True, versions={made_by.name: made_by.version})


def _first_device(types: frozenset[str]) -> str:
    if "cuda" in types and torch.cuda.is_available():
        return "cuda"
    return "cpu" if "cpu" in types else sorted(types)[0]
