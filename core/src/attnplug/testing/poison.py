"""Values that make a forbidden read visible: NaN where nothing may be loaded, huge where a load must be masked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

HUGE = 1.0e4
"""Dwarfs every ordinary score and value, and yet no finite weight times it overflows a float32 accumulator."""
CANARY = 3.0
"""What the sink's row holds before a step."""
OUT_OF_RANGE = 1 << 30
"""What a table holds beyond a request's length: no pool of a test has such a slot."""


def huge(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return large finite values of both signs, so that some head's scores are drawn to them."""
    size = min(HUGE, torch.finfo(dtype).max)
    count = 1
    for n in shape:
        count *= n
    # A pattern without a short period: neither heads nor dimensions line up with it.
    index = torch.arange(count, device=device)
    sign = 1.0 - 2.0 * ((index * 2654435761) // 65536 % 2).float()
    return (size * sign).reshape(tuple(shape)).to(dtype)


def nan(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a NaN of a dtype, a scalar."""
    return torch.full((), float("nan"), dtype=torch.float32, device=device).to(dtype)


_EMPTY: frozenset[Callable[..., Any]] = frozenset(
    {
        torch.empty,
        torch.empty_like,
        torch.empty_strided,
        Tensor.new_empty,
        Tensor.new_empty_strided,
    }
)


class _NanEmpty(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _EMPTY and isinstance(made, Tensor) and made.is_floating_point() and made.device.type != "meta":
            if made.dtype.itemsize == 1:
                made.view(torch.uint8).fill_(0x7F)
            else:
                made.fill_(float("nan"))
        return made


@contextmanager
def nan_empty() -> Iterator[None]:
    """Let memory that is allocated without a value hold NaN, so that an output row nobody writes is seen."""
    if torch.compiler.is_compiling():
        yield
        return
    with _NanEmpty():
        yield
