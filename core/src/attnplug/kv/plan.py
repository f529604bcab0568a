"""One step's plan of where tokens are written and which rows are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..modes import KVSpace


@dataclass(frozen=True, slots=True)
class KVIndexTable:
    """Rows to gather slots from: position j of request b is ``ids[row_ids[b], j // entry_page_size]``.

    With ``entry_page_size`` 1 an entry is a token's slot; otherwise it is a page, and the slot is
    ``entry · entry_page_size + j mod entry_page_size``. A view: the scheduler may overwrite rows after the declared
    read end.
    """

    ids: Tensor
    """[R, max_context / entry_page_size] int32, device; entries beyond a request's length are unspecified."""
    row_ids: Tensor
    """[B] int64, device."""
    entry_page_size: int = 1

    @property
    def row_stride(self) -> int:
        """Entries from one row to the next."""
        return self.ids.stride(0)


@dataclass(frozen=True, slots=True)
class KVLocPlan:
    """What the translator decided for one step. Made once a step, by ``KVIndexTranslator.plan``; read by every layer.

    Tensors are views where the pool is plain; a graph's plan holds the graph's fixed buffers.
    """

    translator_id: int
    """Identity of the translator that made the plan; another's readers refuse it."""
    req_pool_indices: Tensor
    """[B] int64, device."""
    write_slots: Mapping[KVSpace, Tensor]
    """Per space, a physical slot a token: [T] int64 (the encoder space: [T of the encoder])."""
    layer_spaces: Mapping[int, KVSpace] = field(default_factory=dict)
    """The space of each layer's keys and values."""

    def space_of(self, layer_id: int) -> KVSpace:
        """Return the space that a layer reads and writes; FULL where nothing else was said."""
        return self.layer_spaces.get(layer_id, KVSpace.FULL)

    def slice(self, requests: slice, tokens: slice, encoder_tokens: slice) -> KVLocPlan:
        """Return the plan of a part of the batch; every tensor is a view of this one's."""
        writes = {
            space: slots[encoder_tokens if space is KVSpace.ENCODER else tokens]
            for space, slots in self.write_slots.items()
        }
        return KVLocPlan(self.translator_id, self.req_pool_indices[requests], writes, self.layer_spaces)
