"""Whether steps are prepared while the one before runs, and behind which fence."""

from __future__ import annotations

import torch

from attnplug.backend import AttentionBackend
from attnplug.graphs.overlap import ReadEndFence
from attnplug.modes import ForwardMode, SharedReadEnds

__all__ = ["read_end_fence"]

_MODES = (ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED)


def read_end_fence(backend: AttentionBackend, device: torch.device, overlap: bool | None) -> ReadEndFence | None:
    """Return what a step's preparation waits behind; None where steps run one at a time.

    Args:
        backend: What serves the steps.
        device: Where they run.
        overlap: Asked for or not; None: on a GPU where the backend names a read end in every mode. Without one the
            fence is the whole device, behind which nothing overlaps.
    """
    if overlap is None:
        known = max(backend.shared_read_ends(mode) for mode in _MODES) < SharedReadEnds.UNKNOWN
        overlap = device.type == "cuda" and known
    return ReadEndFence(device) if overlap else None
