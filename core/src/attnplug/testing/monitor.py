"""What a backend may not change: the batch, its inputs, the tables, and every slot that it was not given to write."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from ..modes import KVSpace
from .data import raw_bytes
from .results import Failure
from .step import Step
from .world import World

SNAPSHOT_LIMIT = 1 << 30
"""Pools beyond a GiB are not copied; only the slots of the step are looked at."""


def tensors_of(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor inside a batch, an input or a plan, with the name that a message says."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from tensors_of(getattr(value, name), f"{path}.{name}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            yield from tensors_of(getattr(value, one.name), f"{path}.{one.name}")
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from tensors_of(one, f"{path}[{key}]")
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", range(len(value)))
        for name, one in zip(names, value, strict=True):
            yield from tensors_of(one, f"{path}.{name}")


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are bitwise equal; NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return torch.equal(a.contiguous().view(as_int), b.contiguous().view(as_int))


class Untouched:
    """A snapshot of tensors that must stay as they are.

    Args:
        values: Name and tensor, or things that hold tensors.
    """

    def __init__(self, **values: Any) -> None:
        self._kept = [(n, t, t.clone()) for name, v in values.items() for n, t in tensors_of(v, name)]

    def verify(self) -> None:
        """Raise Failure naming every tensor that changed."""
        changed = [name for name, now, before in self._kept if not same_bytes(now, before)]
        if changed:
            raise Failure(
                f"the backend wrote to {', '.join(changed)}, which it may only read",
                fault=f"writes to {changed[0].partition('.')[0]}",
            )


class PoolWatch:
    """The pool before a layer's call, and what it must be after.

    Args:
        world: Whose pool.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        total = sum(buffer.nbytes for _, _, buffer in self._buffers())
        self._whole = total <= SNAPSHOT_LIMIT
        self._before = [buffer.clone() if self._whole else None for _, _, buffer in self._buffers()]

    def _buffers(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield every buffer with its layer, and with 0 for keys and 1 for values."""
        for index, layer in enumerate(self._world.case.layers):
            if layer.reads_pool:
                for which, buffer in enumerate(self._world.stored(index)):
                    yield index, which, buffer

    def verify(self, step: Step, index: int | None, *, saved: bool) -> None:
        """Check that a layer's call stored exactly its rows.

        Args:
            step: What ran.
            index: The layer that ran; None: nothing may have been written.
            saved: Whether it was asked to write.
        """
        for before, (owner, which, buffer) in zip(self._before, self._buffers(), strict=True):
            name = ("keys", "values")[which]
            wanted = self._written(step, owner, which) if saved and owner == index else None
            if wanted is not None and not self._stored_right(buffer, *wanted):
                self._blame_write(buffer, wanted, owner, name)
            if before is None:
                continue
            expected = before
            if wanted is not None:
                self._world.put(expected, *wanted)
            if saved and owner == index and step.batch.num_padding:
                # Padding rows write the sink, each the last word or not: its slot is theirs.
                zero = torch.zeros(1, dtype=torch.int64, device=buffer.device)
                self._world.put(expected, zero, take(self._world, buffer, zero))
            if not same_bytes(buffer, expected):
                raise Failure(self._where(buffer, expected, owner, name), fault="writes slots that are not its own")

    def verify_unchanged(self) -> None:
        """Raise Failure where any slot changed: what is refused has run no kernel."""
        for before, (owner, which, buffer) in zip(self._before, self._buffers(), strict=True):
            if before is not None and not same_bytes(buffer, before):
                name = ("keys", "values")[which]
                raise Failure(f"layer {owner}: {name} were written before the refusal", fault="refuses after writing")

    def _written(self, step: Step, index: int, which: int) -> tuple[Tensor, Tensor] | None:
        world = self._world
        layer = world.case.layers[index]
        if layer.cross and not step.brings_encoder:
            return None
        units = world.units(index)[which]
        placement = world.placements[world.layer_space(index)]
        if world.layer_space(index) is KVSpace.ENCODER:
            slots = [placement.slots[s.request] for s in step.spans]
            rows = [units[s.request] for s in step.spans]
        else:
            slots = [placement.slots[s.request][s.start : s.stop] for s in step.spans]
            rows = [units[s.request][s.start : s.stop] for s in step.spans]
        return torch.cat(slots), torch.cat(rows) if rows else units[0][:0]

    def _stored_right(self, buffer: Tensor, slots: Tensor, rows: Tensor) -> bool:
        return same_bytes(take(self._world, buffer, slots), rows)

    def _blame_write(self, buffer: Tensor, wanted: tuple[Tensor, Tensor], owner: int, name: str) -> None:
        slots, rows = wanted
        now = take(self._world, buffer, slots).double()
        gap = (now - rows.double()).abs().nan_to_num(nan=float("inf")).flatten(1).amax(dim=1)
        row = int(gap.argmax())
        layer = self._world.case.layers[owner]
        scale = layer.k_scale if name == "keys" else layer.v_scale
        fault = f"stores wrong {name}"
        if scale != 1.0 and bool(torch.isclose(now[row], rows[row].double() * scale, rtol=0.07, atol=1e-3).all()):
            fault = f"stores {name} without dividing by {name[0]}_scale"
        raise Failure(
            f"layer {owner}: {name} stored at slot {int(slots[row])} are {_few(now[row])}; x / scale in the pool's "
            f"dtype is {_few(rows[row].double())}",
            fault=fault,
        )

    def _where(self, buffer: Tensor, expected: Tensor, owner: int, name: str) -> str:
        every = torch.arange(self._world.pools[self._world.layer_space(owner)].num_slots, device=buffer.device)
        now, then = take(self._world, buffer, every), take(self._world, expected, every)
        differs = (raw_bytes(now) != raw_bytes(then)) & ~((now != now) & (then != then))
        slots = every[differs.flatten(1).any(dim=1)].tolist()
        return f"layer {owner}: {name} changed at slots {slots[:8]} that this call was not given to write"


def take(world: World, buffer: Tensor, slots: Tensor) -> Tensor:
    """Return rows [n, H, D] of a buffer, in whichever layout."""
    source = raw_bytes(buffer)
    if world.case.layout == "HND" and buffer.dim() == 4:
        rows = source[slots // world.case.page, :, slots % world.case.page]
    else:
        rows = source[slots]
    return rows.view(buffer.dtype)


def _few(row: Tensor) -> Sequence[float]:
    return [round(x, 4) for x in row.flatten()[:4].tolist()]
