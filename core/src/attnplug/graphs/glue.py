"""The glue graph: metadata preparation itself captured, where every leaf says that it can be.

What is captured is ``init_forward_metadata_out_graph``. Its Python does not run at a replay, so a host value that it
reads would be repeated for ever, silently; hence it is shown bounds in place of this step's host numbers, and its first
replay is compared with an eager run.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..backend import AttentionBackend
from ..batch import ForwardBatch
from ..errors import ContractViolation
from ..modes import ForwardMode
from .capture import CapturedGraph, GraphFactory, capture
from .device_checks import may_synchronise
from .pointers import metadata_tensors

WARM_UPS = 2
"""Eager preparations of a key before its capture: the first may compile kernels or grow workspaces."""


def snapshot(backend: AttentionBackend) -> dict[AttentionBackend, Any]:
    """Return every leaf's metadata."""
    return {leaf: leaf.forward_metadata for leaf in backend.leaves()}


def restore(metadata: dict[AttentionBackend, Any]) -> None:
    """Put leaves' metadata back."""
    for leaf, value in metadata.items():
        leaf.forward_metadata = value


@dataclass(slots=True)
class _Entry:
    runs: int = 0
    graph: CapturedGraph | None = None
    metadata: dict[AttentionBackend, Any] = field(default_factory=dict)
    """What the captured preparation made, for the leaves that it prepared."""
    is_compared: bool = False


class GlueGraphs:
    """Captured preparations, one a replay key.

    Args:
        backend: Whose preparation is captured.
        factory: Makes graphs, in the pool of the runner that replays them.
        max_context_len: The bound that stands for every host length.
    """

    def __init__(self, backend: AttentionBackend, factory: GraphFactory, *, max_context_len: int) -> None:
        self._backend, self._factory, self._bound = backend, factory, max_context_len
        self._entries: dict[Hashable, _Entry] = {}

    def refusal(self, mode: ForwardMode) -> str:
        """Return why preparation in a mode may not be captured; empty where it may."""
        return self._backend.metadata_capture_refusal(mode)

    def prepare(self, key: Hashable, view: ForwardBatch) -> bool:
        """Prepare a step whose tensors are a graph's: eagerly at first, then by replay.

        Args:
            key: What the addresses and shapes of the view depend on.
            view: The step, loaded into fixed buffers.

        Returns:
            Whether it was a replay.

        Raises:
            ContractViolation: A leaf refuses; the preparation did what a capture may not; or a replay gives other
                metadata than an eager run.
        """
        entry = self._entries.setdefault(key, _Entry())
        if entry.graph is None:
            reason = self.refusal(view.forward_mode)
            if reason:
                raise ContractViolation(
                    f"metadata preparation cannot be captured: {reason}", remedy="prepare it eagerly at each replay"
                )
            if entry.runs < WARM_UPS:
                entry.runs += 1
                self._backend.init_forward_metadata_out_graph(self._bounded(view))
                return False
            with may_synchronise(view.device):
                entry.graph = self._capture(entry, self._bounded(view))
            entry.graph.replay()
            restore(entry.metadata)
            return True
        entry.graph.replay()
        restore(entry.metadata)
        if not entry.is_compared:
            entry.is_compared = True
            with may_synchronise(view.device):
                self._compare(entry, key, self._bounded(view))
        return True

    def _bounded(self, view: ForwardBatch) -> ForwardBatch:
        return view.replace(
            seq_lens_cpu=None,
            seq_lens_cpu_exact=False,
            seq_lens_sum=self._bound * view.batch_size,
            max_seq_len=self._bound,
        )

    def _capture(self, entry: _Entry, view: ForwardBatch) -> CapturedGraph:
        before, graph = snapshot(self._backend), self._factory.new()
        try:
            with self._factory.region():
                capture(graph, lambda: self._backend.init_forward_metadata_out_graph(view))
            after = snapshot(self._backend)
        finally:
            restore(before)
        entry.metadata = {leaf: value for leaf, value in after.items() if value is not before[leaf]}
        return graph

    def _compare(self, entry: _Entry, key: Hashable, view: ForwardBatch) -> None:
        replayed = {path: (t, t.clone()) for path, t in metadata_tensors(self._backend).items()}
        self._backend.init_forward_metadata_out_graph(view)
        eager = metadata_tensors(self._backend)
        restore(entry.metadata)
        # Only fixed memory is compared: both ran over it, so what neither wrote is equal too.
        wrong = [
            path
            for path, (t, values) in replayed.items()
            if path in eager and eager[path].data_ptr() == t.data_ptr() and not _same(values, eager[path])
        ]
        if wrong:
            raise ContractViolation(
                f"the captured preparation of {key} gives other metadata than an eager run: {', '.join(wrong)}",
                remedy="a host value is baked in: compute it on the device, or give a metadata_capture_refusal",
            )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
