"""A captured graph that a CPU can run: operations are recorded once and replayed over the same memory.

As in a CUDA graph, the host's Python runs at capture only, addresses are those of the capture, and an operation that
synchronises or has a shape that depends on values is refused, by name and line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..errors import ContractViolation
from .lint import caller, fault_of


class _Record(NamedTuple):
    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outs: tuple[Tensor, ...]
    """Results that must keep their address; empty for views and for operations that write their arguments."""


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _aliases(arguments: Any) -> Any:
    # Of the same memory, with the shape of this moment: squeeze_() and its like change the caller's tensor later.
    return tree_map_only(Tensor, torch.Tensor.detach, arguments)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, records: list[_Record]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records = records

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        fault = fault_of(func, args, kwargs)
        if fault:
            raise ContractViolation(
                f"{func} in a captured region {fault}\n  at {caller()}",
                remedy="do it in init_forward_metadata_out_graph, or with fixed shapes on the device",
            )
        result = func(*args, **kwargs)
        returns = func._schema.returns
        if torch.Tag.inplace_view in func.tags or any(r.alias_info and not r.alias_info.is_write for r in returns):
            return result  # A view: it follows its base, and runs on the host.
        writes = any(r.alias_info is not None for r in returns) or func._schema.is_mutable
        kept = () if writes else tuple(t.detach() for t in _tensors(result))
        self.records.append(_Record(func, *_aliases((args, kwargs)), kept))
        return result


class EmulatedGraph:
    """Record tensor operations; replay them over the memory they were recorded on."""

    def __init__(self) -> None:
        self._records: list[_Record] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record the body's operations; the body runs once.

        Raises:
            ContractViolation: An operation synchronises or has a data-dependent shape; nothing is kept then.
        """
        records: list[_Record] = []
        with torch.no_grad(), _Recorder(records):
            yield
        self._records = records

    @property
    def num_operations(self) -> int:
        """How many operations a replay runs."""
        return len(self._records)

    def replay(self) -> None:
        """Run the recorded operations again; results appear in the captured tensors."""
        with torch.no_grad():
            for record in self._records:
                result = record.func(*record.args, **record.kwargs)
                for kept, fresh in zip(record.outs, _tensors(result) if record.outs else (), strict=True):
                    if kept.data_ptr() != fresh.data_ptr() or kept.numel() == 0:
                        kept.copy_(fresh)

    def input_addresses(self) -> set[int]:
        """Return the addresses of storages that a replay reads but did not make."""
        made: set[int] = set()
        read: set[int] = set()
        for record in self._records:
            arguments = [*_tensors(record.args), *_tensors(list(record.kwargs.values()))]
            read.update(t.untyped_storage().data_ptr() for t in arguments)
            made.update(t.untyped_storage().data_ptr() for t in record.outs)
        return read - made
