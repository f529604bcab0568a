"""A small, right backend whose every step can be made wrong: what faulty backends are made from.

Plain on purpose: a loop over requests, gather, scores, mask, softmax. A fault overrides one method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnplug.assembly.env import BackendEnv
from attnplug.attention_io import AttentionExtras, AttentionOutput
from attnplug.backend import AttentionBackend
from attnplug.batch import ForwardBatch
from attnplug.kv.quant import dequantize
from attnplug.kv.write_loc import KVWriteLoc
from attnplug.layer import AttentionLayer, output_dtype
from attnplug.masks.verify import TreeMaskMode
from attnplug.modes import AttentionType, ForwardMode, KVSpace
from attnplug.spec import BackendSpec, Feature, Kind, Phase
from attnplug.spec import ForwardMode as Mode

DENSE = BackendSpec(
    name="dense",
    kinds=frozenset({Kind.SOFTMAX}),
    device_types=frozenset({"cpu", "cuda"}),
    phases=frozenset(Phase),
    modes=frozenset(Mode),
    dtypes=frozenset({"float32", "bfloat16"}),
    kv_dtypes=frozenset({"float32", "bfloat16", "float8_e4m3fn"}),
    features=frozenset(Feature) - {Feature.MLA_ABSORBED, Feature.MLA_ONE_SHOT, Feature.MLA_CHUNKED_PREFIX},
)


@dataclass(frozen=True)
class Lane:
    """One request of a step."""

    index: int
    rows: slice
    queries: int
    length: int


@dataclass(frozen=True)
class Plan:
    """A step's metadata."""

    batch: ForwardBatch
    lanes: tuple[Lane, ...]


class DenseBackend(AttentionBackend):
    """Right in every mode and feature that DENSE declares."""

    def __init__(self, env: BackendEnv, spec: BackendSpec = DENSE) -> None:
        super().__init__(spec, env)

    # Metadata

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        lens, start, lanes = self.lengths(batch), 0, []
        for i, count in enumerate(batch.query_lens_cpu):
            lanes.append(Lane(i, slice(start, start + count), count, lens[i]))
            start += count
        self.forward_metadata = Plan(batch, tuple(lanes))

    def lengths(self, batch: ForwardBatch) -> Sequence[int]:
        """Return the positions that each request reads: the device's, for the host's may be upper bounds."""
        lens: list[int] = batch.kv_lens().tolist()
        return lens

    # Execution

    def forward_decode(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        return self.forward_extend(*args, **kwargs)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        extras: AttentionExtras | None = None,
    ) -> AttentionOutput:
        wants_lse = extras is not None and extras.return_lse
        reads_pool = layer.attn_type is not AttentionType.ENCODER_ONLY
        if k is not None and v is not None and save_kv_cache and reads_pool:
            self.write(layer, batch, k, v)
        out = torch.empty(q.shape[0], layer.num_heads, layer.v_head_dim, dtype=output_dtype(q, v), device=q.device)
        lse = torch.empty(q.shape[0], layer.num_heads, device=q.device)
        for lane in self.forward_metadata.lanes:
            keys, values = self.read(layer, batch, lane)
            if k is not None and v is not None and not layer.is_cross_attention:
                keys, values = self.with_new(layer, lane, keys, values, k, v, saved=save_kv_cache and reads_pool)
            scores = self.scores(q[lane.rows].float(), keys, layer)
            seen = self.visible(layer, batch, lane, keys.shape[0])
            scores, state = self.masked(scores, seen, layer), None
            state = torch.logsumexp(scores, dim=-1)
            weights = torch.exp(scores - state.masked_fill(state.isneginf(), 0.0)[..., None])
            rows = torch.einsum("nhs,shd->nhd", weights, self.expand(values, layer))
            if layer.sinks is not None and not (wants_lse and self.state_leaves_sinks_out):
                rows = self.close_with_sinks(rows, state, layer.sinks)
            out[lane.rows] = rows.to(out.dtype)
            lse[lane.rows] = self.written_lse(state, layer)
        return AttentionOutput(out, lse if wants_lse else None)

    state_leaves_sinks_out = True

    def write(self, layer: AttentionLayer, batch: ForwardBatch, k: Tensor, v: Tensor) -> None:
        self.env.kv_pool.set_kv_buffer(layer, KVWriteLoc.for_layer(batch, layer), k, v)

    def slots(self, layer: AttentionLayer, batch: ForwardBatch, lane: Lane) -> Tensor:
        """Return the slots of every position that the lane reads."""
        space = KVSpace.ENCODER if layer.is_cross_attention else KVSpace.FULL
        assert batch.kv_loc_plan is not None
        assert self.kv_index_translator is not None
        table = self.kv_index_translator.read_source(batch.kv_loc_plan, space)
        return table.ids[table.row_ids[lane.index], : self.length(layer, batch, lane)].long()

    def length(self, layer: AttentionLayer, batch: ForwardBatch, lane: Lane) -> int:
        if layer.is_cross_attention:
            assert batch.encoder_lens is not None
            return int(batch.encoder_lens[lane.index])
        return lane.length

    def read(self, layer: AttentionLayer, batch: ForwardBatch, lane: Lane) -> tuple[Tensor, Tensor]:
        """Return keys and values [S, Hk, …] in float32, dequantised."""
        if layer.attn_type is AttentionType.ENCODER_ONLY:
            heads, device = layer.num_kv_heads, self.env.device
            return (
                torch.zeros(lane.queries, heads, layer.head_dim, device=device),
                torch.zeros(lane.queries, heads, layer.v_head_dim, device=device),
            )
        keys, values = self.env.kv_pool.get_kv_buffer(layer.layer_id)
        at = self.slots(layer, batch, lane)
        return self.dequantised(keys, at, layer.k_scale), self.dequantised(values, at, layer.v_scale)

    def dequantised(self, buffer: Tensor, at: Tensor, scale: float) -> Tensor:
        rows = buffer.view(torch.uint8)[at].view(buffer.dtype) if buffer.dtype.itemsize == 1 else buffer[at]
        return dequantize(rows, scale, torch.float32)

    def with_new(
        self, layer: AttentionLayer, lane: Lane, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, *, saved: bool
    ) -> tuple[Tensor, Tensor]:
        """Put the step's own rows where the pool does not hold them."""
        if saved or not lane.queries:
            return keys, values
        first = keys.shape[0] - lane.queries
        keys, values = keys.clone(), values.clone()
        keys[first:], values[first:] = k[lane.rows].float(), v[lane.rows].float()
        return keys, values

    def expand(self, x: Tensor, layer: AttentionLayer) -> Tensor:
        """Give each query head its KV head."""
        return x.repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=1)

    def scores(self, q: Tensor, keys: Tensor, layer: AttentionLayer) -> Tensor:
        return torch.einsum("nhd,shd->nhs", q, self.expand(keys, layer)) * layer.scaling

    def masked(self, scores: Tensor, seen: Tensor, layer: AttentionLayer) -> Tensor:
        """Cap, then mask."""
        return self.capped(scores, layer).masked_fill(~seen[:, None, :], float("-inf"))

    def capped(self, scores: Tensor, layer: AttentionLayer) -> Tensor:
        return layer.logit_cap * torch.tanh(scores / layer.logit_cap) if layer.logit_cap else scores

    def visible(self, layer: AttentionLayer, batch: ForwardBatch, lane: Lane, length: int) -> Tensor:
        """Return which keys each query sees, [n, S]."""
        device = self.env.device
        index, row = torch.arange(length, device=device)[None, :], torch.arange(lane.queries, device=device)[:, None]
        seen = torch.ones(lane.queries, length, dtype=torch.bool, device=device)
        causal = layer.causal and batch.forward_mode is not ForwardMode.DLLM_EXTEND
        k_pos, q_pos = index, length - lane.queries + row
        info = batch.spec_info
        if batch.forward_mode is ForwardMode.TARGET_VERIFY and info is not None and info.mask is not None:
            seen = self.tree(batch, lane, length)
            depth = batch.positions[lane.rows]
            q_pos = depth[:, None]
            k_pos = torch.cat([torch.arange(length - lane.queries, device=device), depth])[None, :]
        elif causal:
            seen &= self.causal(index, row, length, lane.queries)
        if layer.sliding_window_size >= 0:
            seen &= self.window(q_pos, k_pos, layer.sliding_window_size, causal=causal)
        return seen

    def causal(self, index: Tensor, row: Tensor, length: int, queries: int) -> Tensor:
        return index <= length - queries + row

    def window(self, q_pos: Tensor, k_pos: Tensor, size: int, *, causal: bool) -> Tensor:
        near = k_pos >= q_pos - size
        return near if causal else near & (k_pos <= q_pos + size)

    def tree(self, batch: ForwardBatch, lane: Lane, length: int) -> Tensor:
        """Return the mask's cells of a request, over all its keys."""
        info = batch.spec_info
        assert info is not None
        assert info.mask is not None
        lens = batch.seq_lens if info.mask_seq_lens is None else info.mask_seq_lens
        starts = info.mask.indptr(lens)
        row = info.mask_row + lane.index
        cells = info.mask.buffer[int(starts[row]) : int(starts[row + 1])].view(lane.queries, -1)
        if info.mask.mode is TreeMaskMode.FULL_MASK:
            return cells.clone()
        cached = torch.ones(lane.queries, length - lane.queries, dtype=torch.bool, device=cells.device)
        return torch.cat([cached, cells], dim=1)

    def close_with_sinks(self, rows: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
        return rows * torch.sigmoid(lse - sinks)[..., None]

    def written_lse(self, lse: Tensor, layer: AttentionLayer) -> Tensor:
        return lse
