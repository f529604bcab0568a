"""Host side of a step: which schedule and tile each layer group decodes with, and the scratch that this takes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnplug.assembly.env import BackendEnv
from attnplug.batch import ForwardBatch
from attnplug.graphs.metadata_buffers import BufferSpec, GraphBufferSets
from attnplug.model_spec import LayerGroup, LayerSpec
from attnplug.modes import KVSpace
from attnplug.spec import Kind

from .kernels.args import Widths
from .kernels.config import decode_schedule, decode_tile, programs_per_sm
from .metadata import DecodePlan
from .options import TritonOptions

MAX_DECODE_ROWS = 1024
"""Rows a KV head up to which a verify step runs in the decode kernel, which shares keys out; else in the extend one."""
SHORT_WINDOW = 1024
"""Keys up to which a window is one program's work: its cost is latency, which splitting only adds to."""
RAGGED = 1.5
"""Longest over mean length from which the stream schedule is worth what it costs a uniform batch, 4 to 30 %."""
_GRAPH_STREAM_BATCH = 4
_PARTIALS = "partials"


class GroupShape(NamedTuple):
    """What of a layer group decides how it is computed."""

    widths: Widths
    query_heads: int
    kv_heads: int
    window: int

    @classmethod
    def of(cls, layer: LayerSpec) -> GroupShape:
        """Return a layer's shape; MLA as its absorbed form sees it: one KV head of latent rows."""
        if layer.kind is Kind.MLA:
            widths = Widths(layer.kv_lora_rank, layer.kv_lora_rank, layer.qk_rope_head_dim)
            return cls(widths, layer.num_heads, 1, layer.sliding_window_size)
        widths = Widths(layer.head_dim, layer.v_head_dim)
        return cls(widths, layer.num_heads, layer.num_kv_heads, layer.sliding_window_size)

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.query_heads // self.kv_heads


class Planner:
    """Plans steps for the layer groups of one model.

    Args:
        env: Where the backend runs.
        options: Bounds and choices.
        sms: Multiprocessors of the device.
    """

    def __init__(self, env: BackendEnv, options: TritonOptions, sms: int) -> None:
        self._env, self._options, self._sms = env, options, sms
        self.shapes: dict[LayerGroup, GroupShape] = {}
        for layer in env.model_spec.layers:
            if layer.reads_pool:
                self.shapes.setdefault(layer.group, GroupShape.of(layer))
        self._graph = GraphBufferSets(env.device)
        self._logits = torch.empty(0, dtype=torch.float32, device=env.device)
        self._lse = torch.empty(0, dtype=torch.float32, device=env.device)

    def plan(self, batch: ForwardBatch, query_len: int) -> dict[LayerGroup, DecodePlan]:
        """Return each group's plan for a step of ``query_len`` queries a request; a group without one needs extend."""
        plans = {}
        for group, shape in self.shapes.items():
            if query_len * shape.group <= MAX_DECODE_ROWS:
                plans[group] = self._plan(batch, query_len, group, shape)
        return plans

    def _plan(self, batch: ForwardBatch, query_len: int, group: LayerGroup, shape: GroupShape) -> DecodePlan:
        size, in_graph = batch.batch_size, batch.uses_graph_buffers
        rows = query_len * shape.group
        itemsize = self._env.dtype.itemsize
        stored = self._env.kv_dtype.itemsize
        one = decode_tile(shape.widths, rows, itemsize, size * shape.kv_heads, self._sms, stored)
        programs = shape.kv_heads * -(-rows // one.rows)
        # A graph's launches outlive the lengths they were captured with.
        longest = self._env.limits.max_context_len if in_graph else batch.max_seq_len + batch.draft_token_num
        if group.is_cross_attention and not in_graph:
            longest = max(batch.encoder_lens_cpu or (longest,), default=1)
        elif shape.window >= 0:
            longest = min(longest, shape.window + query_len + one.keys)
        # Programs that fill a multiprocessor alone lose by streaming: 128 heads of MLA, B8 8k: 85 and 153 µs.
        streams = longest > SHORT_WINDOW and programs_per_sm(one) > 1
        ragged = streams and self._is_ragged(batch, in_graph)
        short = 0 <= shape.window < SHORT_WINDOW and not self._env.deterministic
        schedule = decode_schedule(
            batch_size=size,
            heads=programs,
            max_tiles=1 if short else -(-longest // one.keys),
            sms=self._sms,
            max_splits=self._options.max_kv_splits,
            deterministic=self._env.deterministic,
            ragged=ragged,
            keys=one.keys,
            per_sm=programs_per_sm(one),
        )
        launched = programs * schedule.splits * (1 if schedule.kind == "stream" else size)
        return DecodePlan(schedule, decode_tile(shape.widths, rows, itemsize, launched, self._sms, stored))

    def _is_ragged(self, batch: ForwardBatch, in_graph: bool) -> bool:
        if self._options.ragged != "auto":
            return self._options.ragged == "always"
        if in_graph:
            return batch.batch_size >= _GRAPH_STREAM_BATCH
        return batch.max_seq_len * batch.batch_size > RAGGED * batch.seq_lens_sum

    # Scratch

    def _sizes(self, partials: int, query_len: int, shape: GroupShape) -> tuple[int, int]:
        rows = partials * query_len * shape.query_heads
        return rows * shape.widths.dv, rows

    def scratch(
        self, batch: ForwardBatch, query_len: int, plans: dict[LayerGroup, DecodePlan]
    ) -> tuple[Tensor, Tensor]:
        """Return (attn_logits, attn_lse) for a step: a graph's own, of fixed address, or this backend's, which grow."""
        sizes = [self._sizes(plan.schedule.partials, query_len, self.shapes[group]) for group, plan in plans.items()]
        floats, rows = max((s[0] for s in sizes), default=0), max((s[1] for s in sizes), default=0)
        if batch.uses_graph_buffers:
            fixed = self._graph.of(batch, _PARTIALS)
            return fixed.take("attn_logits", (floats,), torch.float32), fixed.take("attn_lse", (rows,), torch.float32)
        if self._logits.numel() < floats:
            self._logits = torch.empty(floats, dtype=torch.float32, device=self._env.device)
        if self._lse.numel() < rows:
            self._lse = torch.empty(rows, dtype=torch.float32, device=self._env.device)
        return self._logits, self._lse

    def reserve(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate a graph's scratch: enough for every batch up to these sizes, of one width."""
        width = max(-(-max_num_tokens // max(max_bs, 1)), 1)
        floats = rows = 1
        for shape in self.shapes.values():
            for query_len in {1, width}:
                partials = self._most_partials(max_bs, query_len, shape)
                size = self._sizes(partials, query_len, shape)
                floats, rows = max(floats, size[0]), max(rows, size[1])
        specs = {
            "attn_logits": BufferSpec((floats,), torch.float32),
            "attn_lse": BufferSpec((rows,), torch.float32),
            "tree_start": BufferSpec((max_bs,), torch.int64),
        }
        self._graph.reserve([_PARTIALS], specs, owner="triton")

    def _most_partials(self, max_bs: int, query_len: int, shape: GroupShape) -> int:
        tile = decode_tile(shape.widths, query_len * shape.group, self._env.dtype.itemsize, 1, self._sms)
        shares = 4 * self._sms // shape.kv_heads + 1
        if not self._env.deterministic:
            # round(shares / B) · B is at most half of B above; stream takes one for each request more.
            return shares + 2 * max_bs
        tiles = -(-self._env.limits.max_context_len // tile.keys)
        return decode_schedule(
            batch_size=max_bs, heads=1, max_tiles=tiles, sms=self._sms, max_splits=1, deterministic=True, ragged=False,
            keys=tile.keys,
        ).partials  # fmt: skip

    def tree_start(self, batch: ForwardBatch) -> Tensor:
        """Return where each request's first mask cell is written, [B] int64, device."""
        return self._graph.of(batch, _PARTIALS).take("tree_start", (batch.batch_size,), torch.int64)

    def close(self) -> None:
        """Give the eager scratch back."""
        self._logits, self._lse = self._logits[:0].clone(), self._lse[:0].clone()


def spaces_of(batch: ForwardBatch, layers: tuple[LayerSpec, ...]) -> set[KVSpace]:
    """Return the spaces that a model's layers read in a step."""
    plan = batch.kv_loc_plan
    assert plan is not None  # the backend refused otherwise
    return {KVSpace.ENCODER if layer.is_cross_attention else plan.space_of(layer.layer_id) for layer in layers}
