"""A small right backend that serves eager and graph steps by one builder, with places where tests break it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug.assembly.env import BackendEnv
from attnplug.attention_io import AttentionExtras, AttentionOutput
from attnplug.backend import AttentionBackend
from attnplug.batch import ForwardBatch
from attnplug.graphs.metadata_buffers import BufferSet, BufferSpec, GraphBufferSets
from attnplug.kv.write_loc import KVWriteLoc
from attnplug.layer import AttentionLayer
from attnplug.masks.verify import TreeMaskMode, VerifyMask
from attnplug.modes import ForwardMode, GraphLevel, SharedReadEnds
from attnplug.spec import BackendSpec, Feature

MODES = (ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.IDLE)
SPEC = BackendSpec(
    name="table",
    device_types=frozenset({"cpu", "cuda"}),
    modes=frozenset(MODES),
    dtypes=frozenset({"float32", "float64"}),
    kv_dtypes=frozenset({"float32", "float64"}),
    features=frozenset({Feature.SLIDING_WINDOW, Feature.HETEROGENEOUS_LAYERS, Feature.CHAIN_VERIFY}),
    graph_level=GraphLevel.UNIFORM,
    needs_cpu_seq_lens=False,
)
TREE_SPEC = SPEC.replace(features=frozenset({Feature.HETEROGENEOUS_LAYERS, Feature.CUSTOM_MASK}))


@dataclass(slots=True)
class TableMetadata:
    """One layer group's step."""

    slots: Tensor
    """[B, S] int32: the slot of each position."""
    lens: Tensor
    """[B] int64: readable positions."""
    row_of: Tensor
    """[T] int64: the request of each query."""


@dataclass(slots=True)
class TreeMetadata(TableMetadata):
    """A tree's step."""

    seen: Tensor
    """[T, S] bool: what each query's mask shows it."""


class TableBackend(AttentionBackend):
    """Gathers a request's whole row of slots, masks by length and position."""

    def __init__(self, env: BackendEnv, spec: BackendSpec = SPEC) -> None:
        super().__init__(spec, env)
        self.kv_index_translator = env.translator
        self.width = env.req_to_token.shape[1]
        self.graph_buffers = GraphBufferSets(env.device)
        self.calls = 0

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        specs = {
            "slots": BufferSpec((max_bs, self.width), torch.int32),
            "lens": BufferSpec((max_bs,), torch.int64),
            "row_of": BufferSpec((max_num_tokens,), torch.int64),
        }
        self.graph_buffers.reserve(self.env.model_spec.groups, specs, owner=self.name)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.forward_metadata = {
            group: self.build(self.graph_buffers.of(batch, group), batch) for group in self.env.model_spec.groups
        }

    def build(self, buffers: BufferSet, batch: ForwardBatch) -> TableMetadata:
        b, t = batch.batch_size, batch.num_tokens
        made = TableMetadata(
            buffers.take("slots", (b, self.width), torch.int32),
            buffers.take("lens", (b,), torch.int64),
            buffers.take("row_of", (t,), torch.int64),
        )
        self.fill(made, batch)
        return made

    def fill(self, made: TableMetadata, batch: ForwardBatch) -> None:
        made.slots.copy_(self.env.req_to_token[batch.req_pool_indices])
        made.lens.copy_(batch.kv_lens())
        rows = torch.arange(batch.batch_size, device=self.env.device)
        made.row_of.copy_(torch.repeat_interleave(rows, batch.query_lens(), output_size=batch.num_tokens))

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        extras: AttentionExtras | None = None,
    ) -> AttentionOutput:
        self.calls += 1
        assert k is not None
        assert v is not None
        self.write(k, v, layer, batch)
        step = self.forward_metadata[layer.group]
        slots = self.slots(step, batch).long()
        keys, values = self.env.kv_pool.get_kv_buffer(layer.layer_id)
        at = torch.arange(self.width, device=q.device)
        seen = self.visible(step, batch, at)
        if layer.sliding_window_size >= 0:
            seen = seen & (at >= batch.positions[:, None] - layer.sliding_window_size)
        # A table's entries beyond a length may be anything, and so may what they would name.
        rows = torch.where(seen, slots[step.row_of], torch.zeros_like(slots[step.row_of]))
        wide = layer.num_heads // layer.num_kv_heads
        key = keys[rows].repeat_interleave(wide, 2).masked_fill(~seen[..., None, None], 0)
        value = values[rows].repeat_interleave(wide, 2).masked_fill(~seen[..., None, None], 0)
        scores = torch.einsum("thd,tshd->ths", q, key) * layer.scaling
        weights = torch.softmax(scores.masked_fill(~seen[:, None], float("-inf")), -1).nan_to_num()
        return AttentionOutput(torch.einsum("ths,tshd->thd", weights, value))

    forward_extend = forward_decode

    def visible(self, step: TableMetadata, batch: ForwardBatch, at: Tensor) -> Tensor:
        """Return which of the positions ``at`` each query sees, windows apart."""
        return (at < step.lens[step.row_of][:, None]) & (at <= batch.positions[:, None])

    def write(self, k: Tensor, v: Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        self.env.kv_pool.set_kv_buffer(layer, KVWriteLoc.for_layer(batch, layer), k, v)

    def slots(self, step: TableMetadata, batch: ForwardBatch) -> Tensor:
        return step.slots

    def shared_read_ends(self, mode: ForwardMode) -> SharedReadEnds:
        return SharedReadEnds.PRE_REPLAY

    def metadata_capture_refusal(self, mode: ForwardMode) -> str:
        return "" if mode.is_decode else "only decode was looked at"


class InGraphTable(TableBackend):
    """Makes its metadata inside the graph: shared reads end there."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.filling = False
        super().init_forward_metadata_out_graph(batch, in_capture)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        for made in self.forward_metadata.values():
            super().fill(made, batch)

    def fill(self, made: TableMetadata, batch: ForwardBatch) -> None:
        """Nothing: it is done in the graph."""

    def shared_read_ends(self, mode: ForwardMode) -> SharedReadEnds:
        return SharedReadEnds.IN_REPLAY


class ItemInGraph(InGraphTable):
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        self.longest = batch.seq_lens.max().item()


class RebuiltAtReplay(TableBackend):
    def build(self, buffers: BufferSet, batch: ForwardBatch) -> TableMetadata:
        made = super().build(buffers, batch)
        made.slots = made.slots.clone()
        return made


class TableNotRefreshed(TableBackend):
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.refreshes = in_capture or not batch.uses_graph_buffers
        super().init_forward_metadata_out_graph(batch, in_capture)

    def fill(self, made: TableMetadata, batch: ForwardBatch) -> None:
        kept = made.slots.clone()
        super().fill(made, batch)
        if not self.refreshes:
            made.slots.copy_(kept)


class _OwnWriteSlots(TableBackend):
    """Keeps write slots of its own, as a library does that wants them in another dtype."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.own = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.env.device)

    def write(self, k: Tensor, v: Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        loc = KVWriteLoc.for_layer(batch, layer)
        if batch.uses_graph_buffers:
            loc = KVWriteLoc(self.own[: batch.num_tokens], loc.space)
        self.env.kv_pool.set_kv_buffer(layer, loc, k, v)


class PaddingNotReset(_OwnWriteSlots):
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        if batch.uses_graph_buffers:
            real = batch.num_tokens // max(batch.batch_size, 1) * (batch.batch_size - batch.num_padding)
            self.own[:real].copy_(batch.out_cache_loc[:real])


class StaleWritesAtCapture(_OwnWriteSlots):
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        # In a capture it leaves whatever an earlier step's replay left there.
        if batch.uses_graph_buffers and not in_capture:
            self.own[: batch.num_tokens].copy_(batch.out_cache_loc)


class TooEarlyReadEnd(TableBackend):
    """Reads the scheduler's table in its kernels, and declares PRE_REPLAY."""

    def slots(self, step: TableMetadata, batch: ForwardBatch) -> Tensor:
        return self.env.req_to_token[batch.req_pool_indices]


class GroupsShareBuffers(TableBackend):
    """Leaves out of a window group's table what is before its window, and keeps all groups in the first one's set."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        groups = self.env.model_spec.groups
        self.forward_metadata = {}
        for group in groups:
            made = self.build(self.graph_buffers.of(batch, groups[0]), batch)
            if group.sliding_window_size >= 0:
                first = made.lens - batch.query_lens() - group.sliding_window_size
                made.slots.masked_fill_(torch.arange(self.width, device=self.env.device) < first[:, None], 0)
            self.forward_metadata[group] = made


class TreeTable(TableBackend):
    """Verifies trees: what each query sees by the mask is made with the table."""

    def __init__(self, env: BackendEnv, spec: BackendSpec = TREE_SPEC) -> None:
        super().__init__(env, spec)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.seen = GraphBufferSets(self.env.device)
        specs = {"seen": BufferSpec((max_num_tokens, self.width), torch.bool)}
        self.seen.reserve(self.env.model_spec.groups, specs, owner=self.name)

    def build(self, buffers: BufferSet, batch: ForwardBatch) -> TableMetadata:
        made = super().build(buffers, batch)
        info = batch.spec_info
        if info is None or info.mask is None:
            return made
        group, shape = self.env.model_spec.groups[0], (batch.num_tokens, self.width)
        sets = self.seen if batch.uses_graph_buffers else GraphBufferSets(self.env.device)
        tree = TreeMetadata(made.slots, made.lens, made.row_of, sets.of(batch, group).take("seen", shape, torch.bool))
        self.fill_tree(tree, info.mask, batch)
        return tree

    def fill_tree(self, made: TreeMetadata, mask: VerifyMask, batch: ForwardBatch) -> None:
        width, cached = mask.draft_token_num, batch.seq_lens[made.row_of][:, None]
        at = torch.arange(self.width, device=self.env.device)
        draft = (torch.arange(batch.num_tokens, device=self.env.device) % width)[:, None]
        full = mask.mode is TreeMaskMode.FULL_MASK
        columns, column = (cached + width, at) if full else (width, at - cached)
        cell = mask.indptr(batch.seq_lens)[made.row_of][:, None] + draft * columns + column
        seen = mask.buffer[cell.clamp(0, mask.buffer.numel() - 1)]
        made.seen.copy_(seen if full else seen | (at < cached))

    def visible(self, step: TableMetadata, batch: ForwardBatch, at: Tensor) -> Tensor:
        if isinstance(step, TreeMetadata):
            return step.seen & (at < step.lens[step.row_of][:, None])
        return super().visible(step, batch, at)


class TreeOfTheCapture(TreeTable):
    """Reads the mask when a size is captured, and in no replay."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.reads_mask = in_capture or not batch.uses_graph_buffers
        super().init_forward_metadata_out_graph(batch, in_capture)

    def fill_tree(self, made: TreeMetadata, mask: VerifyMask, batch: ForwardBatch) -> None:
        if self.reads_mask:
            super().fill_tree(made, mask, batch)


class HostValueInGlue(TableBackend):
    """Says that its preparation can be captured, and counts steps on the host in it."""

    steps = 0

    def fill(self, made: TableMetadata, batch: ForwardBatch) -> None:
        super().fill(made, batch)
        self.steps += 1
        made.lens.add_(self.steps)
