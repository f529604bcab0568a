"""Where metadata is written: fresh tensors in eager mode, fixed ones under a graph, by one and the same builder.

A backend makes one ``GraphBufferSets`` in ``init_cuda_graph_state`` with a set for each layer group, and its builder
takes every tensor by name::

    buffers = self._graph_buffers.of(batch, group)
    indptr = buffers.take("kv_indptr", (batch.batch_size + 1,), torch.int32)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..batch import ForwardBatch
from ..errors import ContractViolation


class BufferSpec(NamedTuple):
    """A buffer of fixed address."""

    shape: tuple[int, ...]
    """The largest extent of each dimension."""
    dtype: torch.dtype
    fill: float = 0
    """What it holds before anything was written: a legal value, since capture runs over it."""


class BufferSet(Protocol):
    """Tensors by name for one layer group's metadata."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of that shape, contents unspecified: what is read must be written first.

        Args:
            name: Names the buffer; one dtype for good.
            shape: What this step needs.
            dtype: As reserved.
        """


@dataclass(slots=True)
class FreshBuffers:
    """Eager mode: every taking allocates, so that two steps in flight share nothing."""

    device: torch.device
    _dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a new tensor; see ``BufferSet.take``.

        Raises:
            ContractViolation: The name was taken with another dtype.
        """
        _check_dtype(name, dtype, self._dtypes.setdefault(name, dtype))
        return torch.empty(shape, dtype=dtype, device=self.device)


class FixedBuffers:
    """A graph's: allocated once by the maxima; what is taken is a corner of it, at the same address for every size.

    Rows keep their address in every size too: a taken tensor has the strides of the whole, so it is contiguous only
    where all dimensions but the first are taken whole.

    Args:
        specs: Each buffer's largest shape.
        device: Where the graph runs.
        owner: Whose buffers these are, for messages.
    """

    def __init__(self, specs: Mapping[str, BufferSpec], device: torch.device, *, owner: str = "") -> None:
        self.owner = owner
        self._buffers = {
            name: torch.full(spec.shape, spec.fill, dtype=spec.dtype, device=device) for name, spec in specs.items()
        }

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a slice of the fixed buffer; see ``BufferSet.take``. Nothing is allocated.

        Raises:
            ContractViolation: No such buffer, too little room, or another dtype.
        """
        whole = self._buffers.get(name)
        if whole is None:
            raise ContractViolation(
                f"{self._of(name)} was never reserved; reserved: {', '.join(sorted(self._buffers)) or 'none'}",
                remedy="reserve it in init_cuda_graph_state, so that its address is fixed before any capture",
            )
        _check_dtype(name, dtype, whole.dtype)
        if whole.dim() != len(shape) or any(asked > room for asked, room in zip(shape, whole.shape, strict=True)):
            raise ContractViolation(
                f"{self._of(name)} has no room: asked {tuple(shape)}, capacity {tuple(whole.shape)}",
                remedy="reserve it in init_cuda_graph_state by max_bs, max_num_tokens and the longest context",
            )
        return whole[tuple(slice(extent) for extent in shape)]

    def nbytes(self) -> int:
        """Return the bytes held."""
        return sum(t.nbytes for t in self._buffers.values())

    def _of(self, name: str) -> str:
        return f"buffer {name!r} of {self.owner}" if self.owner else f"buffer {name!r}"


class GraphBufferSets:
    """One set of fixed buffers for each layer group; two groups never share one, since both are read in one step.

    Args:
        device: Where the backend runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sets: dict[Hashable, FixedBuffers] = {}

    def reserve(self, groups: Iterable[Hashable], specs: Mapping[str, BufferSpec], *, owner: str = "") -> None:
        """Allocate a set for each group; called in ``init_cuda_graph_state``.

        Raises:
            ContractViolation: A group has a set already: graphs may have been captured over its addresses.
        """
        groups = tuple(groups)
        again = [group for group in groups if group in self._sets]
        if again:
            raise ContractViolation(
                f"graph buffers of {again[0]} are reserved a second time, so captured addresses would be lost",
                remedy="call init_cuda_graph_state once, with the largest maxima (attnplug.graphs.state does)",
            )
        for group in groups:
            self._sets[group] = FixedBuffers(specs, self.device, owner=f"{owner} {group}".strip())

    def of(self, batch: ForwardBatch, group: Hashable) -> BufferSet:
        """Return where this step's metadata of a group is written: fixed for a graph's batch, else fresh.

        Raises:
            ContractViolation: A graph's batch, and no buffers of this group.
        """
        if not batch.uses_graph_buffers:
            return FreshBuffers(self.device)
        fixed = self._sets.get(group)
        if fixed is None:
            raise ContractViolation(
                f"a graph's batch came, and no graph buffers are reserved for {group}",
                remedy="call init_cuda_graph_state before the first captured step",
            )
        return fixed

    def nbytes(self) -> int:
        """Return the bytes held by all sets."""
        return sum(one.nbytes() for one in self._sets.values())


def _check_dtype(name: str, asked: torch.dtype, reserved: torch.dtype) -> None:
    if asked != reserved:
        raise ContractViolation(
            f"buffer {name!r} was asked as {asked}, and is {reserved}",
            remedy="give two names to two buffers, or take it with one dtype everywhere",
        )
