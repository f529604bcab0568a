"""Storage of keys and values in a pool's dtype: ``x / scale``, saturating."""

from __future__ import annotations

import torch
from torch import Tensor

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def quantize(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return ``x / scale`` in a storage dtype; fp8 saturates at its largest finite value. Never in place.

    Args:
        x: Any float dtype, any shape.
        scale: What a reader multiplies by.
        dtype: The pool's dtype.
    """
    if scale != 1.0:
        x = x.to(torch.float32) / scale
    if dtype in FP8_DTYPES:
        # torch's cast turns an overflow into NaN (e4m3fn) or infinity (e5m2).
        limit = torch.finfo(dtype).max
        x = x.to(torch.float32).clamp(-limit, limit)
    return x.to(dtype)


def dequantize(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return ``x · scale`` in a compute dtype."""
    y = x.to(dtype)
    return y if scale == 1.0 else y * scale
