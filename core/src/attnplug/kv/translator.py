"""The one place where a request's positions become slots: every read and write goes through it, exactly once.

On a plain pool, where the scheduler's slots are the pool's, it passes tensors through and launches nothing; what a
kernel needs packed (a CSR stream or a page table) it packs on the device without a synchronisation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import BatchError, ContractViolation
from ..modes import KVSpace
from .plan import KVIndexTable, KVLocPlan
from .pools import KVPool

if TYPE_CHECKING:
    from ..backend import AttentionBackend


class KVIndexTranslator:
    """Readers and writers of one pool's id spaces.

    Args:
        pool: Whose slots are addressed.
        req_to_token: [R, max_context] int32, device: the slot of each position, a row a request; row 0 is the padding
            row and names the sink. The scheduler owns and overwrites it.
        encoder_req_to_token: The same for the encoder's space, where the model has one.
        layer_spaces: The space of each layer; layers left out are in the full one.
    """

    def __init__(
        self,
        pool: KVPool,
        req_to_token: Tensor,
        *,
        encoder_req_to_token: Tensor | None = None,
        layer_spaces: Mapping[int, KVSpace] | None = None,
    ) -> None:
        self.pool, self.page_size, self.device = pool, pool.page_size, req_to_token.device
        self._tables = {KVSpace.FULL: req_to_token}
        if encoder_req_to_token is not None:
            self._tables[KVSpace.ENCODER] = encoder_req_to_token
        for kind, table in self._tables.items():
            if table.dtype != torch.int32 or table.dim() != 2:
                raise BatchError(
                    [f"the {kind.value} table is {tuple(table.shape)} {table.dtype}; must be [R, S] int32"]
                )
        self._layer_spaces = dict(layer_spaces or {})

    @property
    def spaces(self) -> frozenset[KVSpace]:
        """The spaces that can be read."""
        return frozenset(self._tables)

    def plan(
        self,
        *,
        req_pool_indices: Tensor,
        out_cache_loc: Tensor,
        encoder_out_cache_loc: Tensor | None = None,
    ) -> KVLocPlan:
        """Make a step's plan: writes are translated here, once for each space.

        Args:
            req_pool_indices: [B] int64, device.
            out_cache_loc: [T] int64, device: the scheduler's slots.
            encoder_out_cache_loc: [T of the encoder] int64, device.
        """
        writes = {KVSpace.FULL: out_cache_loc}
        if encoder_out_cache_loc is not None:
            writes[KVSpace.ENCODER] = encoder_out_cache_loc
        return KVLocPlan(id(self), req_pool_indices, writes, self._layer_spaces)

    def write_ids(self, plan: KVLocPlan, kind: KVSpace) -> Tensor:
        """Return the slots that this step writes in a space, [T] int64, device."""
        self._check(plan)
        return plan.write_slots[kind]

    def read_source(self, plan: KVLocPlan, kind: KVSpace) -> KVIndexTable:
        """Return the rows to gather slots from, without a copy: the reader's read end is then POST_REPLAY.

        Raises:
            ContractViolation: The plan is another translator's, or the space is not served.
        """
        self._check(plan)
        return KVIndexTable(self._table(kind), plan.req_pool_indices)

    def pack_read_stream(
        self,
        plan: KVLocPlan,
        *,
        seq_lens: Tensor,
        indptr: Tensor,
        out: Tensor,
        kv_start_idx: Tensor | None = None,
        kind: KVSpace,
        entry_page_size: int = 1,
    ) -> None:
        """Fill a CSR stream: ``indptr`` and ``out[indptr[b]:indptr[b + 1]]``, the entries of request b in order.

        No host synchronisation and no data-dependent shape: entries of ``out`` past ``indptr[B]`` become the sink's. A
        stream that is too short cannot be told without one: ``indptr`` then ends where ``out`` does, so that no kernel
        reads past it, and the last requests lose their last positions. Size ``out`` by the host's upper bounds.

        Args:
            plan: This step's plan; its rows are read.
            seq_lens: [B] int64, device: positions to read, counted from kv_start_idx.
            indptr: [B + 1] int32, device: overwritten.
            out: [capacity] int32 or int64, device: overwritten; at least as long as the sum of entries.
            kv_start_idx: [B] int64, device: the first position; with pages, rounded down to a page's start.
            kind: Which space to read.
            entry_page_size: 1 for slots; the pool's page size for pages.
        """
        self._check(plan)
        if entry_page_size not in (1, self.page_size):
            raise ContractViolation(f"entries of {entry_page_size} tokens: the pool's pages have {self.page_size}")
        rows, start = plan.req_pool_indices, torch.zeros_like(seq_lens) if kv_start_idx is None else kv_start_idx
        first = torch.div(start, entry_page_size, rounding_mode="floor")
        last = torch.div(start + seq_lens + entry_page_size - 1, entry_page_size, rounding_mode="floor")
        counts = torch.where(seq_lens > 0, last - first, torch.zeros_like(first))
        indptr.zero_()
        torch.cumsum(counts.to(torch.int32), 0, dtype=torch.int32, out=indptr[1:])
        indptr.clamp_(max=out.numel())
        if out.numel() == 0 or rows.numel() == 0:
            out.zero_()
            return
        table, ends = self._table(kind), indptr[1:].to(torch.int64)
        entry = torch.arange(out.numel(), dtype=torch.int64, device=self.device)
        lane = torch.searchsorted(ends, entry, right=True)
        past = lane >= rows.numel()
        lane = lane.clamp_max(rows.numel() - 1)
        position = (entry - indptr[:-1].to(torch.int64)[lane] + first[lane]) * entry_page_size
        position = position.clamp(0, table.shape[1] - 1)
        ids = table[rows[lane], position]
        if entry_page_size > 1:
            ids = torch.div(ids, entry_page_size, rounding_mode="floor")
        out.copy_(torch.where(past, torch.zeros_like(ids), ids))

    def copy_page_table(self, plan: KVLocPlan, *, out: Tensor, kind: KVSpace) -> None:
        """Fill a page table: ``out[b, i]`` is the page of positions i·p … i·p + p - 1 of request b.

        Args:
            plan: This step's plan.
            out: [B, n] int32, device; columns past a request's pages are unspecified, but always legal pages.
            kind: Which space to read.
        """
        self._check(plan)
        page, table = self.page_size, self._table(kind)
        columns = torch.arange(out.shape[1], device=self.device) * page
        slots = table[plan.req_pool_indices[:, None], columns.clamp_max(table.shape[1] - 1)[None, :]]
        pages = torch.div(slots, page, rounding_mode="floor")
        out.copy_(pages.clamp(0, self.pool.num_slots // page - 1))

    def last_page_lens(self, seq_lens: Tensor, *, out: Tensor) -> None:
        """Fill how many positions of a request's last page are in use, [B] int32; 0 for an empty request."""
        rest = torch.remainder(seq_lens - 1, self.page_size) + 1
        out.copy_(torch.where(seq_lens > 0, rest, torch.zeros_like(rest)))

    def bind_and_verify_backends(self, backends: Iterable[AttentionBackend]) -> None:
        """Set this translator on every leaf that has none, and refuse a leaf that reads through another.

        Raises:
            ContractViolation: Naming the backend that is bound elsewhere.
        """
        for root in backends:
            for leaf in root.leaves():
                if leaf.kv_index_translator is None:
                    leaf.kv_index_translator = self
                elif leaf.kv_index_translator is not self:
                    raise ContractViolation(
                        f"backend {leaf.name!r} reads through another translator than its pool's",
                        remedy="build every backend of a model from one BackendEnv",
                    )

    def _table(self, kind: KVSpace) -> Tensor:
        table = self._tables.get(kind)
        if table is None:
            raise ContractViolation(
                f"the {kind.value} space is not served; served: {', '.join(k.value for k in self._tables)}",
                remedy="give the translator that space's table",
            )
        return table

    def _check(self, plan: KVLocPlan) -> None:
        if plan.translator_id != id(self):
            raise ContractViolation(
                "the plan was made by another translator", remedy="plan each step with the translator of the BackendEnv"
            )
