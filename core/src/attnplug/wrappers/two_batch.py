"""Two-batch overlap: a step is cut in two, and each half has a backend, metadata and workspace of its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..attention_io import AttentionExtras, AttentionOutput
from ..backend import AttentionBackend
from ..batch import ForwardBatch
from ..batch_parts import token_slices
from ..layer import AttentionLayer
from ..modes import ForwardMode
from .composite import CompositeBackend, StepPart


def split_point(batch: ForwardBatch) -> int:
    """Return how many requests the first half has, so that both halves have nearly equal numbers of tokens."""
    ends = list(accumulate(batch.query_lens_cpu))
    half = (ends[-1] if ends else 0) / 2
    cuts = [0, *ends]
    return min(range(len(cuts)), key=lambda i: (abs(cuts[i] - half), i))


class TwoBatchOverlapBackend(CompositeBackend):
    """Serve each half of a step by a child; results are joined in order, also when a half is empty.

    Args:
        first: Serves the first requests.
        second: Serves the rest; shares no workspace with the first.
    """

    def __init__(self, first: AttentionBackend, second: AttentionBackend) -> None:
        super().__init__((first, second))

    def step_parts(self, batch: ForwardBatch) -> Sequence[StepPart]:
        if batch.batch_size == 0 or batch.forward_mode is ForwardMode.IDLE:
            return (StepPart(self._children[0], batch),)
        cut = split_point(batch)
        spans = ((0, cut), (cut, batch.batch_size))
        return tuple(
            StepPart(child, batch.slice(start, stop))
            for child, (start, stop) in zip(self._children, spans, strict=True)
            if stop > start
        )

    def child_for(self, layer_id: int, mode: ForwardMode) -> AttentionBackend:
        # Both children are built alike, so either answers for a layer.
        return self._children[0]

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        extras: AttentionExtras | None = None,
    ) -> AttentionOutput:
        if batch.batch_size == 0 or batch.forward_mode is ForwardMode.IDLE:
            return self._children[0].forward(q, k, v, layer, batch, save_kv_cache, extras)
        outs, start = [], 0
        for child, part in self.parts_of(batch):
            rows, encoder = token_slices(batch, start, start + part.batch_size)
            start += part.batch_size
            kv_rows = encoder if layer.is_cross_attention else rows
            outs.append(
                child.forward(
                    q[rows],
                    None if k is None else k[kv_rows],
                    None if v is None else v[kv_rows],
                    layer,
                    part,
                    save_kv_cache,
                    None if extras is None else extras.narrow(rows, kv_rows),
                )
            )
        if len(outs) == 1:
            return outs[0]
        lses = [one.lse for one in outs if one.lse is not None]
        aux = {name: torch.cat([one.aux[name] for one in outs if one.aux]) for name in outs[0].aux or {}}
        return AttentionOutput(
            torch.cat([one.out for one in outs]), torch.cat(lses) if len(lses) == len(outs) else None, aux or None
        )
