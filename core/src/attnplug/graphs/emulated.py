"""A captured graph that a CPU can run: operations are recorded once and replayed over the same memory.

As in a CUDA graph, the host's Python runs at capture only, addresses are those of the capture, and an operation that
synchronises or has a shape that depends on values is refused, by name and line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..errors import ContractViolation
from .lint import CallLint, fault_of, refuse


class _Record(NamedTuple):
    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outs: tuple[Tensor, ...]
    """Results that must keep their address; empty for views and for operations that write their arguments."""


class _Marker(NamedTuple):
    """A host function between two operations: what an event is in a CUDA graph."""

    reached: Callable[[], None]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _aliases(arguments: Any) -> Any:
    # Of the same memory, with the shape of this moment: squeeze_() and its like change the caller's tensor later.
    return tree_map_only(Tensor, torch.Tensor.detach, arguments)


def _is_view(result: Any, args: tuple[Any, ...]) -> bool:
    memory = {t.untyped_storage().data_ptr() for t in _tensors(args)}
    return all(t.untyped_storage().data_ptr() in memory for t in _tensors(result))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, records: list[_Record | _Marker]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records = records

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        fault = fault_of(func, args, kwargs)
        if fault:
            refuse(str(func), fault)
        result = func(*args, **kwargs)
        returns = func._schema.returns
        if torch.Tag.inplace_view in func.tags:
            return result
        if any(r.alias_info and not r.alias_info.is_write for r in returns) and _is_view(result, args):
            return result  # It follows its base, and runs on the host. A reshape() that had to copy is no view.
        writes = func._schema.is_mutable or any(r.alias_info and r.alias_info.is_write for r in returns)
        kept = () if writes else tuple(t.detach() for t in _tensors(result))
        self.records.append(_Record(func, _aliases(args), _aliases(kwargs), kept))
        return result


class EmulatedGraph:
    """Record tensor operations; replay them over the memory they were recorded on."""

    def __init__(self) -> None:
        self._records: list[_Record | _Marker] = []
        self._recording: list[_Record | _Marker] = []
        self._modes: ExitStack | None = None

    def begin(self) -> None:
        """Start recording this thread's operations; ``end`` or ``abort`` must follow."""
        if self._modes is not None:
            raise ContractViolation("a graph is captured inside its own capture")
        self._recording = []
        self._modes = ExitStack()
        self._modes.enter_context(torch.no_grad())
        self._modes.enter_context(CallLint())
        self._modes.enter_context(_Recorder(self._recording))

    def end(self) -> None:
        """Stop recording and keep what was recorded."""
        self._leave()
        self._records = self._recording

    def abort(self) -> None:
        """Stop recording and keep nothing."""
        self._leave()
        self._recording = []

    def _leave(self) -> None:
        if self._modes is not None:
            self._modes.close()
            self._modes = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record the body's operations; the body runs once.

        Raises:
            ContractViolation: An operation synchronises or has a data-dependent shape; nothing is kept then.
        """
        self.begin()
        try:
            yield
        except BaseException:
            self.abort()
            raise
        self.end()

    def mark(self, reached: Callable[[], None]) -> None:
        """Call a host function at this place of each replay; during a capture only."""
        if self._modes is None:
            raise ContractViolation("a graph was marked outside its capture")
        self._recording.append(_Marker(reached))

    @property
    def num_operations(self) -> int:
        """How many operations a replay runs."""
        return sum(isinstance(record, _Record) for record in self._records)

    def replay(self) -> None:
        """Run the recorded operations again; results appear in the captured tensors."""
        # Inference mode may write what was made in either mode; the other may not.
        with torch.inference_mode():
            for record in self._records:
                if isinstance(record, _Marker):
                    record.reached()
                    continue
                result = record.func(*record.args, **record.kwargs)
                for kept, fresh in zip(record.outs, _tensors(result) if record.outs else (), strict=True):
                    if kept.data_ptr() != fresh.data_ptr() or kept.numel() == 0:
                        kept.copy_(fresh)

    def input_addresses(self) -> set[int]:
        """Return the addresses of storages that a replay reads but did not make."""
        made: set[int] = set()
        read: set[int] = set()
        for record in self._records:
            if isinstance(record, _Marker):
                continue
            arguments = [*_tensors(record.args), *_tensors(list(record.kwargs.values()))]
            read.update(t.untyped_storage().data_ptr() for t in arguments)
            made.update(t.untyped_storage().data_ptr() for t in record.outs)
        return read - made
