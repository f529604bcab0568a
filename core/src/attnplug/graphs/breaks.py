"""Cutting a model's forward at its attention calls: pieces are captured, the calls between them stay eager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..attention_io import AttentionExtras, AttentionOutput
from ..backend import AttentionBackend
from ..batch import ForwardBatch
from ..errors import ContractViolation
from ..layer import AttentionLayer
from ..modes import ForwardMode
from ..wrappers.composite import CompositeBackend
from .capture import CapturedGraph, GraphFactory


class Shape(NamedTuple):
    """What a warm-up's call returned, so that a capture can make the same without running it."""

    layer: AttentionLayer
    out: Tensor
    """Of no memory: on the meta device."""
    lse: Tensor | None
    aux: dict[str, Tensor] | None


class Call(NamedTuple):
    """An attention call between two pieces, with the fixed tensors that it reads and fills."""

    layer: AttentionLayer
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    save_kv_cache: bool
    extras: AttentionExtras | None
    result: AttentionOutput

    def run(self, backend: AttentionBackend, batch: ForwardBatch) -> None:
        """Attend for a step's own rows; rows past them become zeros.

        Args:
            backend: Its metadata is this step's.
            batch: The step, without padding.
        """
        rows = slice(0, batch.num_tokens)
        got = backend.forward(
            self.q[rows],
            None if self.k is None else self.k[rows],
            None if self.v is None else self.v[rows],
            self.layer,
            batch,
            self.save_kv_cache,
            None if self.extras is None else self.extras.narrow(rows, rows),
        )
        _fill(self.result.out, got.out, 0)
        if self.result.lse is not None and got.lse is not None:
            _fill(self.result.lse, got.lse, float("-inf"))
        for name, fixed in (self.result.aux or {}).items():
            assert got.aux is not None
            _fill(fixed, got.aux[name], 0)


def _fill(fixed: Tensor, value: Tensor, past: float) -> None:
    rows = value.shape[0]
    fixed[:rows].copy_(value.reshape(rows, *fixed.shape[1:]))
    if rows < fixed.shape[0]:
        fixed[rows:].fill_(past)


class BreakingBackend(CompositeBackend):
    """Stands before a backend while a forward is cut: watches calls at warm-up, cuts at them in a capture.

    Args:
        backend: Runs the calls.
        factory: Makes the pieces.
    """

    def __init__(self, backend: AttentionBackend, factory: GraphFactory) -> None:
        super().__init__((backend,))
        self._factory = factory
        self._shapes: list[Shape] = []
        self._is_cutting = False
        self._open: Call | None = None
        """The call before the piece in progress."""
        self.pieces: list[CapturedGraph] = []
        self.calls: list[Call] = []

    def child_for(self, layer_id: int, mode: ForwardMode) -> AttentionBackend:
        return self._children[0]

    def watch(self) -> None:
        """Run calls eagerly and remember what they return; before each warm-up."""
        self._shapes, self._is_cutting = [], False

    def begin(self) -> None:
        """Begin the first piece."""
        self.pieces, self.calls, self._is_cutting = [self._factory.new()], [], True
        self.pieces[-1].begin()

    def end(self) -> None:
        """End the last piece.

        Raises:
            ContractViolation: Fewer calls came than at warm-up.
        """
        self._end_piece()
        if len(self.calls) != len(self._shapes):
            raise _unsteady(f"{len(self.calls)} attention calls; at warm-up {len(self._shapes)}")

    def _end_piece(self) -> None:
        self._is_cutting = False
        self.pieces[-1].end()
        if self._open is not None:
            # The piece after a call is captured, so its memory and that of the result are apart from what the call
            # reads. From here on the pool may have all of it back as soon as the model lets go.
            alias, call = self._factory.alias, self._open
            self.calls.append(tree_map_only(Tensor, alias, call._replace(extras=_aliased(call.extras, alias))))
            self._open = None

    def abort(self) -> None:
        """End the piece in progress and keep nothing."""
        if self._is_cutting:
            self._is_cutting = False
            self.pieces[-1].abort()
        self.pieces, self.calls, self._open = [], [], None

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
        if not self._is_cutting:
            got = self._children[0].forward(q, k, v, layer, batch, save_kv_cache, extras)
            aux = None if got.aux is None else {name: _meta(t) for name, t in got.aux.items()}
            self._shapes.append(Shape(layer, _meta(got.out), None if got.lse is None else _meta(got.lse), aux))
            return got
        index = len(self.pieces) - 1
        if index >= len(self._shapes) or self._shapes[index].layer is not layer:
            raise _unsteady(
                f"attention call {index} is of layer {layer.layer_id}, which the warm-up did not make there"
            )
        self._end_piece()
        following = self._factory.new()
        if self._factory.allocates_in_capture:
            following.begin()
            result = _like(self._shapes[index], q.device)
        else:
            result = _like(self._shapes[index], q.device)
            following.begin()
        self.pieces.append(following)
        self._is_cutting = True
        self._open = Call(layer, q, k, v, save_kv_cache, extras, result)
        return result


def _meta(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device="meta")


def _aliased(extras: AttentionExtras | None, alias: Callable[[Tensor], Tensor]) -> AttentionExtras | None:
    if extras is None:
        return None
    values = ((one.name, getattr(extras, one.name)) for one in fields(extras))
    aliases: dict[str, Any] = {name: alias(t) for name, t in values if isinstance(t, Tensor)}
    return replace(extras, **aliases)


def _like(shape: Shape, device: torch.device) -> AttentionOutput:
    def make(t: Tensor) -> Tensor:
        return torch.empty(t.shape, dtype=t.dtype, device=device)

    aux = None if shape.aux is None else {name: make(t) for name, t in shape.aux.items()}
    return AttentionOutput(make(shape.out), None if shape.lse is None else make(shape.lse), aux)


def _unsteady(what: str) -> ContractViolation:
    return ContractViolation(
        f"the model's forward is not the same twice: {what}",
        remedy="run such a model eagerly: a graph repeats one sequence of calls",
    )
