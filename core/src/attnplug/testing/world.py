"""Everything a backend is built from and reads, made from a case: pool, tables, environment, layers. Poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..assembly.env import BackendEnv, Limits
from ..kv.pools import KVPool, MHAKVPool, MLAKVPool, SpacedKVPool
from ..kv.translator import KVIndexTranslator
from ..layer import AttentionLayer
from ..model_spec import ModelSpec
from ..modes import ForwardMode, KVSpace, MlaForm
from ..spec import Kind
from .case import Case
from .data import LayerData, draw, hide_before, raw_bytes, shared_prefix
from .poison import CANARY, OUT_OF_RANGE, huge, nan

SPARE_PAGES = 5
"""Pages that no table lists; they hold NaN."""
OFFSET_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the requests lie in one space."""

    rows: Tensor
    """[B] int64: each request's row of the table."""
    slots: list[Tensor]
    """[S] int64 for each request, on the device."""
    pages: Tensor
    """Listed pages, int64."""


class World:
    """The surroundings of one case.

    Args:
        case: What to build.
        device: Where.
        deterministic: Ask the backend for batch-invariant results.
    """

    def __init__(self, case: Case, device: torch.device, *, deterministic: bool = False) -> None:
        self.case, self.device, self.deterministic = case, device, deterministic
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.kv_dtype: torch.dtype = getattr(torch, case.pool_dtype)
        self.specs = tuple(layer.spec(i) for i, layer in enumerate(case.layers))
        self.data = [draw(case, i, device) for i in range(len(case.layers))]
        self._hide_what_windows_cut()
        self._random = torch.Generator().manual_seed(case.seed + 17)
        self.pools: dict[KVSpace, MHAKVPool | MLAKVPool] = {}
        self.placements: dict[KVSpace, Placement] = {}
        self._make_pools()
        self.pool: KVPool = self._join_pools()
        self.table = self._make_table(KVSpace.FULL, case.lengths)
        self.encoder_table = self._make_table(KVSpace.ENCODER, case.encoder) if case.encoder else None
        for i in range(len(case.layers)):
            self._fill(i)
        self.layers = [self._make_layer(i) for i in range(len(case.layers))]
        self.translator = KVIndexTranslator(
            self.pool,
            self.table,
            encoder_req_to_token=self.encoder_table,
            layer_spaces=self.pool.layer_spaces if isinstance(self.pool, SpacedKVPool) else None,
        )

    @cached_property
    def env(self) -> BackendEnv:
        """Where the backend is built."""
        case = self.case
        width = self.table.shape[1]
        return BackendEnv(
            device=self.device,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            page_size=case.page,
            req_to_token=self.table,
            kv_pool=self.pool,
            translator=self.translator,
            model_spec=ModelSpec(name="conformance", layers=self.specs, dtype=case.dtype, max_context_len=width),
            limits=Limits(
                max_batch_size=len(case.queries) + case.pad + 1,
                max_num_tokens=sum(case.lengths) + max((*case.queries, 1)) * (case.pad + 1) + sum(case.encoder),
                max_context_len=width,
            ),
            deterministic=self.deterministic,
        )

    def layer_space(self, index: int) -> KVSpace:
        """Return the space of a layer's slots."""
        return KVSpace.ENCODER if self.case.layers[index].cross else KVSpace.FULL

    def stored(self, index: int) -> tuple[Tensor, ...]:
        """Return a layer's buffers; MLA has one."""
        keys, values = self.pool.get_kv_buffer(index)
        return (keys,) if self.case.layers[index].kind is Kind.MLA else (keys, values)

    def put(self, buffer: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Write rows [n, H, D] of the pool's dtype at slots, in whichever layout; the pool's own code is not used."""
        target, source = raw_bytes(buffer), raw_bytes(rows)
        if self.case.layout == "HND" and buffer.dim() == 4:
            target[slots // self.case.page, :, slots % self.case.page] = source
        else:
            target[slots] = source

    def units(self, index: int) -> tuple[list[Tensor], ...]:
        """Return what belongs in each of a layer's buffers, by request."""
        data = self.data[index]
        return (data.k_units,) if self.case.layers[index].kind is Kind.MLA else (data.k_units, data.v_units)

    def _hide_what_windows_cut(self) -> None:
        for layer, data in zip(self.case.layers, self.data, strict=True):
            if layer.window < 0 or layer.cross or not layer.reads_pool or self.case.place == "shared":
                continue
            for b, prefix in enumerate(self.case.prefix):
                hide_before(data, layer, b, min(prefix, prefix - layer.window))

    def _make_pools(self) -> None:
        case = self.case
        own = [spec for spec, layer in zip(self.specs, case.layers, strict=True) if not layer.cross]
        cross = [spec for spec, layer in zip(self.specs, case.layers, strict=True) if layer.cross]
        for space, specs, lengths in ((KVSpace.FULL, own, case.lengths), (KVSpace.ENCODER, cross, case.encoder)):
            if space is KVSpace.ENCODER and not cross:
                continue
            needed = sum(-(-length // case.page) for length in lengths)
            count = max(needed + SPARE_PAGES, self._pages_for_wide_offsets() if case.high else 0)
            if any(spec.kind is Kind.MLA for spec in specs):
                pool: MHAKVPool | MLAKVPool = MLAKVPool(
                    specs, num_pages=count, page_size=case.page, dtype=self.kv_dtype, device=self.device, space=space
                )
            else:
                pool = MHAKVPool(
                    specs,
                    num_pages=count,
                    page_size=case.page,
                    dtype=self.kv_dtype,
                    device=self.device,
                    space=space,
                    layout=case.layout,
                )
            self.pools[space] = pool
            self.placements[space] = self._place(lengths, count)

    def _pages_for_wide_offsets(self) -> int:
        """Return pages so many that an element's offset in the smallest buffer does not fit 31 bits."""
        layer = self.case.layers[0]
        stride = layer.latent + layer.rope if layer.kind is Kind.MLA else layer.kv_heads * layer.dim
        needed = sum(-(-length // self.case.page) for length in self.case.lengths)
        return OFFSET_LIMIT // (stride * self.case.page) + needed + SPARE_PAGES

    def _join_pools(self) -> KVPool:
        pools = tuple(self.pools.values())
        return pools[0] if len(pools) == 1 else SpacedKVPool(pools)

    def _place(self, lengths: tuple[int, ...], count: int) -> Placement:
        page = self.case.page
        needed = [-(-length // page) for length in lengths]
        if self.case.high:
            free = count - torch.randperm(sum(needed), generator=self._random)
        elif self.case.place == "run":
            free = torch.arange(2, sum(needed) + 2)
        elif self.case.place == "swapped":
            free = _swapped(needed)
        elif self.case.place == "reversed":
            free = torch.arange(sum(needed), 0, -1)
        else:
            free = 1 + torch.randperm(count, generator=self._random)
        common, taken, slots, shared = shared_prefix(self.case) // page, 0, [], free[:0]
        for b, n in enumerate(needed):
            pages = free[taken : taken + n]
            taken += n
            if b == 0:
                shared = pages[:common]
            else:
                pages = torch.cat([shared, pages[common:]])
            ids = (pages[:, None] * page + torch.arange(page)[None, :]).reshape(-1)
            slots.append(ids[: lengths[b]].to(self.device))
        # A request has one row number in every table.
        first = self.placements.get(KVSpace.FULL)
        rows = (
            1 + torch.randperm(len(lengths) + 3, generator=self._random)[: len(lengths)]
            if first is None
            else first.rows
        )
        listed = torch.unique(torch.cat([s // page for s in slots])) if slots else free[:0]
        return Placement(rows.to(self.device), slots, listed.to(self.device))

    def _make_table(self, space: KVSpace, lengths: tuple[int, ...]) -> Tensor:
        placement = self.placements.get(space)
        # Wider than any length by a page and more: a kernel that reads whole pages must not find the tensor's end.
        width = -(-(max((*lengths, 1)) + 8) // self.case.page) * self.case.page + self.case.page
        table = torch.full((len(lengths) + 4, width), OUT_OF_RANGE, dtype=torch.int32, device=self.device)
        table[0] = 0
        if placement is not None:
            for row, slots in zip(placement.rows.tolist(), placement.slots, strict=True):
                table[row, : slots.numel()] = slots.to(torch.int32)
        return table

    def _fill(self, index: int) -> None:
        """Poison a layer's buffers, then write what was cached before the step."""
        case, layer = self.case, self.case.layers[index]
        if not layer.reads_pool:
            return
        placement = self.placements[self.layer_space(index)]
        page = torch.arange(case.page, device=self.device)
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        for buffer, units in zip(self.stored(index), self.units(index), strict=True):
            width = buffer.shape[-1]
            raw_bytes(buffer).copy_(raw_bytes(nan(buffer.dtype, self.device)).expand(buffer.shape))
            heads = buffer.shape[1]
            for pages in (placement.pages, zero):
                slots = (pages[:, None] * case.page + page[None, :]).reshape(-1)
                self.put(buffer, slots, huge((slots.numel(), heads, width), buffer.dtype, self.device))
            self.put(buffer, zero, torch.full((1, heads, width), CANARY, device=self.device).to(buffer.dtype))
            cached = case.encoder if layer.cross else case.prefix
            # The step itself brings the encoder's rows in prefill, so only decode finds them cached.
            if layer.cross and case.mode is not ForwardMode.DECODE:
                continue
            for b, slots in enumerate(placement.slots):
                self.put(buffer, slots[: cached[b]], units[b][: cached[b]])

    def _make_layer(self, index: int) -> AttentionLayer:
        layer, spec = self.case.layers[index], self.specs[index]
        sinks = self.data[index].sinks
        return AttentionLayer.from_spec(spec, sinks=sinks, k_scale=layer.k_scale, v_scale=layer.v_scale)

    @property
    def absorbed(self) -> bool:
        """Whether MLA layers run over the latent rows of the pool."""
        return self.case.mla == MlaForm.ABSORBED.value

    def layer_data(self, index: int) -> LayerData:
        """Return one layer's logical tensors."""
        return self.data[index]


def _swapped(needed: Sequence[int]) -> Tensor:
    """Return runs of pages whose ends are in place and whose middles are reversed: their ends alone say 'a run'."""
    pages = torch.arange(2, sum(needed) + 2)
    start = 0
    for count in needed:
        inner = slice(start + 1, start + count - 1)
        if count > 3:
            pages[inner] = pages[inner].flip(0)
        start += count
    return pages
