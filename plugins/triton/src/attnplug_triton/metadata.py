"""What a step's metadata is: views of the batch's own tensors, and how each layer group's keys are shared out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from attnplug.model_spec import LayerGroup
from attnplug.modes import ForwardMode, KVSpace

from .kernels.args import Table, Tree
from .kernels.config import Schedule, TileConfig


class DecodePlan(NamedTuple):
    """How one layer group's decode runs in a step."""

    schedule: Schedule
    tile: TileConfig


@dataclass(slots=True)
class TritonMetadata:
    """One step, compiled. Lengths and tables are the batch's own: nothing is copied, and nothing is launched for it."""

    mode: ForwardMode
    batch_size: int
    query_len: int
    """W, queries of each request where all have as many; 0 where they differ."""
    query_lens: Tensor | None
    """[B] int32, device, where they differ."""
    max_query_len: int
    query_lens_cpu: tuple[int, ...] | None
    """[B] on the host; None in a graph, whose launches must fit any lengths."""
    tables: dict[KVSpace, Table] = field(default_factory=dict)
    extra_len: int = 0
    """The draft window, which ``seq_lens`` leaves out under verify."""
    tree: Tree | None = None
    plans: dict[LayerGroup, DecodePlan] = field(default_factory=dict)
    attn_logits: Tensor | None = None
    """[floats] float32, device: normalised partials, [partials, W, Hq, Dv]; each layer's launch overwrites them."""
    attn_lse: Tensor | None = None
    """[rows] float32, device: their LSE, [partials, W, Hq]."""

    @property
    def num_kv_splits(self) -> dict[LayerGroup, int]:
        """Shares a request, or of the whole batch under 'stream', for each group."""
        return {group: plan.schedule.splits for group, plan in self.plans.items()}

    def many_short(self, group: int) -> bool:
        """Whether tiles of 128 rows would be padding for a third or more: many requests with few queries."""
        lens = self.query_lens_cpu
        if lens is None or self.batch_size < 2:
            return False
        rows = sum(lens) * group
        return 2 * sum(-(-n * group // 128) for n in lens) * 128 > 3 * rows
