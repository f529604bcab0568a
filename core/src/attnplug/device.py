"""Facts about a device that selection reads. torch is imported only where the facts must be asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import ConfigError

_ABSTRACT = re.compile(r"(?P<type>[a-z]+)@sm_?(?P<cc>\d{2,3})")
_CONCRETE = re.compile(r"(?P<type>[a-z]+)(:(?P<index>\d+))?")


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device as selection sees it."""

    type: str
    """torch's device type, such as 'cpu' and 'cuda'."""
    compute_capability: int | None = None
    """As 90 for sm_90; None on devices that have none."""
    index: int | None = None
    name: str = ""

    def __str__(self) -> str:
        index = "" if self.index is None else f":{self.index}"
        capability = "" if self.compute_capability is None else f" sm_{self.compute_capability}"
        return f"{self.type}{index}{capability}"


def describe_device(device: str | DeviceFacts | None = None) -> DeviceFacts:
    """Return the facts of a device.

    Args:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``; ``"cuda@sm90"`` for a device that is not in this machine (to ask
            what would run there); None for the best device of this machine.

    Raises:
        ConfigError: The text names no device, or one that this machine lacks.
    """
    if isinstance(device, DeviceFacts):
        return device
    if device is None:
        import torch

        return describe_device("cuda" if torch.cuda.is_available() else "cpu")
    if abstract := _ABSTRACT.fullmatch(device):
        return DeviceFacts(abstract["type"], int(abstract["cc"]), name=device)
    concrete = _CONCRETE.fullmatch(device)
    if concrete is None:
        allowed = "'cpu', 'cuda', 'cuda:0', or 'cuda@sm90' for a device of another machine"
        raise ConfigError(
            f"{device!r} names no device; allowed: {allowed}", key="device", value=device, allowed=allowed
        )
    index = int(concrete["index"]) if concrete["index"] else None
    if concrete["type"] != "cuda":
        return DeviceFacts(concrete["type"], index=index)
    return _cuda(device, index)


def _cuda(device: str, index: int | None) -> DeviceFacts:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (index or 0) >= count:
        raise ConfigError(
            f"device {device!r} is not in this machine: torch {torch.__version__} sees {count} CUDA devices",
            key="device",
            value=device,
            allowed=", ".join(["cpu", *(f"cuda:{i}" for i in range(count))]),
            remedy="choose --device cpu, or ask about another machine's with --device cuda@sm90",
        )
    index = torch.cuda.current_device() if index is None else index
    major, minor = torch.cuda.get_device_capability(index)
    return DeviceFacts("cuda", 10 * major + minor, index, torch.cuda.get_device_name(index))
