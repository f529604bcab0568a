"""The pointer check: every tensor that a replay's metadata holds must be where the capture found it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from ..backend import AttentionBackend
from ..errors import ContractViolation

_OPAQUE = (
    *(str, bytes, int, float, complex, type(None), type, partial, nn.Module, AttentionBackend),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType),
)
_MAX_DEPTH = 12


def metadata_tensors(backend: AttentionBackend) -> dict[str, Tensor]:
    """Return every tensor that the leaves' ``forward_metadata`` holds, by its field path.

    Walks dataclasses, named tuples, mappings, sequences and objects with slots or a ``__dict__``.
    """
    leaves = tuple(backend.leaves())
    counts = Counter(leaf.name for leaf in leaves)
    found: dict[str, Tensor] = {}
    for index, leaf in enumerate(leaves):
        name = leaf.name if counts[leaf.name] == 1 else f"{leaf.name}#{index}"
        found.update(_walk(leaf.forward_metadata, f"{name}.forward_metadata", set(), 0))
    return found


def _walk(value: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
        return
    if isinstance(value, _OPAQUE) or id(value) in seen or depth > _MAX_DEPTH:
        return
    seen.add(id(value))
    for name, part in _parts(value):
        yield from _walk(part, f"{path}{name}", seen, depth + 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield f"[{key!r}]", part
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None)
        for i, part in enumerate(value):
            yield (f".{names[i]}" if names else f"[{i}]"), part
    elif is_dataclass(value):
        for one in fields(value):
            yield f".{one.name}", getattr(value, one.name, None)
    else:
        slots = [name for cls in type(value).__mro__ for name in _names(getattr(cls, "__slots__", ()))]
        for name in dict.fromkeys([*slots, *getattr(value, "__dict__", {})]):
            if name not in ("__dict__", "__weakref__"):
                yield f".{name}", getattr(value, name, None)


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


class PointerCheck:
    """Remembers the addresses of a capture and compares a replay's with them.

    Args:
        backend: Whose leaves' metadata was just compiled for the capture.
    """

    def __init__(self, backend: AttentionBackend) -> None:
        self._captured = {path: t for path, t in metadata_tensors(backend).items() if t.numel()}

    def keep_only(self, is_read: Callable[[Tensor], bool]) -> None:
        """Forget tensors that the capture does not read; called once, when it has ended."""
        # What is compared stays alive: the address of a freed tensor could be handed out again, and pass.
        self._captured = {path: t for path, t in self._captured.items() if is_read(t)}

    def compare(self, backend: AttentionBackend, *, what: str) -> None:
        """Compare the metadata that a replay compiled.

        Args:
            backend: The same backend, refreshed.
            what: Names the replay in the message.

        Raises:
            ContractViolation: Naming each field path whose tensor moved or is gone.
        """
        now = metadata_tensors(backend)
        wrong = []
        for path, captured in self._captured.items():
            tensor, address = now.get(path), captured.data_ptr()
            if tensor is None:
                wrong.append(f"{path}: captured at {address:#x}, and gone at this replay")
            elif tensor.data_ptr() != address:
                wrong.append(f"{path}: captured at {address:#x}, at this replay at {tensor.data_ptr():#x}")
        if wrong:
            lines = "\n  ".join(wrong)
            raise ContractViolation(
                f"{what}: metadata moved, so the graph reads stale memory:\n  {lines}",
                remedy="allocate it in init_cuda_graph_state and refresh it in place (graphs.metadata_buffers does)",
            )
