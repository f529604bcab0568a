"""Which operations may not be in a captured step, and where they were called: the rules of ``_in_graph``, as code.

Two modes watch: calls of Python's torch functions (what a host read is on a CPU, where no operation is dispatched for
it), and dispatched operations. Launches of Triton and of kernel libraries pass below both.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ContractViolation

_HERE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent

_READS = "reads a value to the host"
_SHAPE = "has a result whose shape depends on values"
_BAKED = "makes a tensor of host data, which a replay would repeat unchanged"

SYNCHRONISING = {
    "aten::_local_scalar_dense": "reads a value to the host (.item(), int(), float(), bool() or .tolist())",
    "aten::is_nonzero": _READS,
    "aten::equal": _READS,
    "aten::_assert_async": "may raise on the host",
    "aten::_pin_memory": "allocates pinned memory, which synchronises",
}
DATA_DEPENDENT = {
    "aten::nonzero": _SHAPE,
    "aten::argwhere": _SHAPE,
    "aten::masked_select": _SHAPE,
    "aten::_unique": _SHAPE,
    "aten::_unique2": _SHAPE,
    "aten::unique_dim": _SHAPE,
    "aten::unique_dim_consecutive": _SHAPE,
    "aten::unique_consecutive": _SHAPE,
    "aten::repeat_interleave": _SHAPE,
    "aten::bincount": _SHAPE,
    "aten::resize_": "moves a tensor to other memory",
    "aten::set_": "moves a tensor to other memory",
}
HOST_CALLS = {
    "item": _READS,
    "tolist": _READS,
    "cpu": "copies to the host",
    "numpy": "hands the memory to the host",
    "__array__": "hands the memory to numpy",
    "__int__": _READS,
    "__float__": _READS,
    "__bool__": _READS,
    "__index__": f"{_READS} (as an index, a slice or a range)",
    "__complex__": _READS,
    "allclose": _READS,
    "pin_memory": "allocates pinned memory, which synchronises",
    "tensor": _BAKED,
    "new_tensor": _BAKED,
    "frombuffer": _BAKED,
}
"""Names of Python-level calls, of the functions of torch and of the methods of a tensor."""


def call_fault(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return why a call of Python's torch API may not be in a captured region; empty where it may."""
    name = getattr(func, "__name__", "")
    if name in HOST_CALLS:
        return HOST_CALLS[name]
    if name in ("as_tensor", "asarray") and args and not isinstance(args[0], Tensor):
        return _BAKED
    if name == "tensor_split":
        points = kwargs.get("tensor_indices_or_sections", args[1] if len(args) > 1 else None)
        return _READS if isinstance(points, Tensor) else ""
    if name == "to":
        # A device object may well be the backend's own; the word is the host, wherever the backend runs.
        target = kwargs.get("device", args[1] if len(args) > 1 else None)
        return "copies to the host" if isinstance(target, str) and target.startswith("cpu") else ""
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return "indexes by a list of host numbers" if any(isinstance(i, (list, range)) for i in index) else ""
    return ""


def fault_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return why a dispatched operation may not be captured; empty where it may.

    Args:
        func: The dispatched ``OpOverload``.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    name = func._schema.name
    if name in SYNCHRONISING:
        return SYNCHRONISING[name]
    if name == "aten::repeat_interleave" and (
        kwargs.get("output_size") is not None or func._overloadname == "self_int"
    ):
        return ""
    if name in DATA_DEPENDENT:
        return DATA_DEPENDENT[name]
    if name in ("aten::index", "aten::index_put_", "aten::index_put"):
        return _index_fault(name, args, kwargs)
    if name == "aten::_to_copy":
        target = kwargs.get("device")
        return "" if target is None else _copy_fault(args[0].device, torch.device(target))
    if name == "aten::copy_":
        return _copy_fault(args[1].device, args[0].device)
    return ""


def _copy_fault(source: torch.device, target: torch.device) -> str:
    if source.type == target.type:
        return ""
    if target.type == "cpu":
        return "copies from the device to the host"
    return "copies from the host to the device: a replay would copy whatever that memory holds then"


def _index_fault(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    indices = [i for i in (args[1] if len(args) > 1 else kwargs.get("indices", ())) if isinstance(i, Tensor)]
    masked = any(i.dtype in (torch.bool, torch.uint8) for i in indices)
    fills = len(args) > 2 and isinstance(args[2], Tensor) and args[2].numel() == 1
    if masked and (name == "aten::index" or not fills):
        return "indexes by a mask, so that a shape depends on values"
    if any(i.device.type != args[0].device.type for i in indices):
        return "indexes by a tensor of the host"
    return ""


def caller() -> str:
    """Return 'file:line' of the innermost frame outside torch and this package's graphs."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if _HERE not in path.parents and _TORCH not in path.parents and "<" not in frame.filename:
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return "unknown place"


def refuse(what: str, fault: str) -> None:
    """Raise for an operation in a captured region, with the line that called it."""
    raise ContractViolation(
        f"{what} in a captured region {fault}\n  at {caller()}",
        remedy="do it in init_forward_metadata_out_graph, or with fixed shapes on the device",
    )


class CallLint(TorchFunctionMode):
    """Refuses host reads and host data as Python calls them."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        fault = call_fault(func, args, kwargs)
        if fault:
            refuse(f"{getattr(func, '__name__', func)}()", fault)
        return func(*args, **kwargs)


class OperationLint(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses synchronising and data-dependent operations as they are dispatched."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        fault = fault_of(func, args, kwargs)
        if fault:
            refuse(str(func), fault)
        return func(*args, **kwargs)


@contextmanager
def lint_region() -> Iterator[None]:
    """Apply the rules of a captured region to the body, without capturing it.

    Raises:
        ContractViolation: Naming the first operation at fault and its line.
    """
    with CallLint(), OperationLint():  # type: ignore[no-untyped-call]
        yield
