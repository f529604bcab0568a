"""Softmax and linear attention in one model: layers are routed by id, both sides compile each step."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..backend import AttentionBackend
from ..batch import ForwardBatch
from ..modes import ForwardMode
from .composite import CompositeBackend, StepPart


class HybridLinearAttnBackend(CompositeBackend):
    """Route layers by id.

    Args:
        full: Serves the softmax layers.
        linear: Serves the others, and dispatches on the batch's logical mode.
        full_attn_layers: Ids of the softmax layers.
    """

    def __init__(self, full: AttentionBackend, linear: AttentionBackend, full_attn_layers: Collection[int]) -> None:
        super().__init__((full, linear))
        self.full_attn_backend, self.linear_attn_backend = full, linear
        self.full_attn_layers = frozenset(full_attn_layers)

    def serving(self, mode: ForwardMode) -> Sequence[AttentionBackend]:
        return self._children

    def step_parts(self, batch: ForwardBatch) -> Sequence[StepPart]:
        logical = batch.logical_mode
        physical = batch if logical is batch.forward_mode else batch.replace(forward_mode=logical)
        return (StepPart(self.full_attn_backend, batch), StepPart(self.linear_attn_backend, physical))

    def child_for(self, layer_id: int, mode: ForwardMode) -> AttentionBackend:
        return self.full_attn_backend if layer_id in self.full_attn_layers else self.linear_attn_backend
