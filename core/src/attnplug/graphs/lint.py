"""Which operations may not be in a captured step, and where they were called: the rules of ``_in_graph``, as code."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch

_HERE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent

SYNCHRONISING = {
    "aten::_local_scalar_dense": "reads a value to the host (.item(), int(), float(), bool() or .tolist())",
    "aten::is_nonzero": "reads a value to the host",
    "aten::equal": "reads a value to the host",
    "aten::_assert_async": "may raise on the host",
}
DATA_DEPENDENT = {
    "aten::nonzero": "has a result whose shape depends on values",
    "aten::masked_select": "has a result whose shape depends on values",
    "aten::_unique2": "has a result whose shape depends on values",
    "aten::unique_dim": "has a result whose shape depends on values",
    "aten::unique_consecutive": "has a result whose shape depends on values",
    "aten::repeat_interleave": "has a result whose shape depends on values",
    "aten::bincount": "has a result whose shape depends on values",
}


def fault_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return why an operation may not be captured; empty where it may.

    Args:
        func: The dispatched ``OpOverload``.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    name = func._schema.name
    if name in SYNCHRONISING:
        return SYNCHRONISING[name]
    if name == "aten::repeat_interleave" and "output_size" in kwargs and kwargs["output_size"] is not None:
        return ""
    if name in DATA_DEPENDENT:
        return DATA_DEPENDENT[name]
    if name in ("aten::index", "aten::index_put_", "aten::index_put"):
        indices = args[1] if len(args) > 1 else kwargs.get("indices", ())
        masks = [i for i in indices if isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)]
        if masks and (name == "aten::index" or not _is_scalar(args)):
            return "indexes by a mask, so that a shape depends on values"
    if name == "aten::_to_copy":
        target = kwargs.get("device")
        if target is not None and args[0].device.type != "cpu" and torch.device(target).type == "cpu":
            return "copies from the device to the host"
    if name == "aten::copy_" and args[0].device.type == "cpu" and args[1].device.type != "cpu":
        return "copies from the device to the host"
    return ""


def _is_scalar(args: tuple[Any, ...]) -> bool:
    return len(args) > 2 and isinstance(args[2], torch.Tensor) and args[2].numel() == 1


def caller() -> str:
    """Return 'file:line' of the innermost frame outside torch and this package's graphs."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if _HERE not in path.parents and _TORCH not in path.parents and "<" not in frame.filename:
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return "unknown place"
