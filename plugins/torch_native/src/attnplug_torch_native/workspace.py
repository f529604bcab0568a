"""Buffers that outlive a call: a fresh allocation of megabytes costs more in page faults than the copy into it."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


class Workspace:
    """Named scratch tensors of one backend instance; instances that may run at once never share one.

    Args:
        device: Where the buffers are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor; the next ``take`` of the same name and dtype overwrites it."""
        numel = prod(shape)
        flat = self._flat.get((name, dtype))
        if flat is None or flat.numel() < numel:
            flat = torch.empty(numel, dtype=dtype, device=self._device)
            self._flat[name, dtype] = flat
        return flat[:numel].view(shape)

    def nbytes(self) -> int:
        """Return the bytes held."""
        return sum(t.nbytes for t in self._flat.values())

    def clear(self) -> None:
        """Give every buffer back."""
        self._flat.clear()
