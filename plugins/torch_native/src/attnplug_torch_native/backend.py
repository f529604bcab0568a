"""The reference backend: metadata once a step, then one layer at a time through the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug.assembly.env import BackendEnv
from attnplug.attention_io import AttentionExtras, AttentionOutput
from attnplug.backend import AttentionBackend
from attnplug.batch import ForwardBatch
from attnplug.errors import ContractViolation
from attnplug.graphs.metadata_buffers import GraphBufferSets
from attnplug.kv.write_loc import KVWriteLoc
from attnplug.layer import AttentionLayer, output_dtype
from attnplug.model_spec import LayerSpec
from attnplug.modes import AttentionType, ForwardMode, GraphLevel, KVSpace, MlaForm, SharedReadEnds
from attnplug.spec import Kind
from attnplug.spec_info import SpecInfo

from .checks import check_call, check_mla, compute_dtype, is_causal
from .kernels.softmax import Scores
from .kernels.tile import attend_apart, attend_tile
from .metadata import ReadKey, StepMetadata, Tile, select_rows
from .options import TorchNativeOptions
from .padded import PaddedRead, buffer_specs, fixed_tiles
from .planner import plan_chunk, plan_pool, plan_rows, start_step
from .sources import PoolSource, RowSource, Source
from .spec import SPEC
from .tree import TreeCells
from .workspace import Workspace


class TorchNativeBackend(AttentionBackend):
    """Every mode and every feature of the contract, in plain PyTorch.

    With ``env.deterministic`` a request's result is bitwise the same whatever else is in the batch: each is computed
    apart, and how follows from its own lengths. Without it, requests of like lengths share calls.

    Args:
        env: Where it runs.
        options: Memory bounds.
    """

    forward_metadata: StepMetadata | None

    def __init__(self, env: BackendEnv, options: TorchNativeOptions | None = None) -> None:
        super().__init__(SPEC, env)
        self._options = options or TorchNativeOptions()
        self._workspace = Workspace(env.device)
        self._attend_tile = attend_apart if env.deterministic else attend_tile
        # Fused CUDA kernels split keys by how full the device is: their sums change in the last bit.
        self._unfused = env.deterministic and env.device.type != "cpu"
        self._pool_layers = tuple(x for x in env.model_spec.layers if x.kind in SPEC.kinds and x.reads_pool)
        self._buffers, self._columns = GraphBufferSets(env.device), dict[ReadKey, int]()
        self.kv_index_translator = env.translator

    # Metadata

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        step = start_step(batch)
        self.forward_metadata = step
        if batch.forward_mode is ForwardMode.IDLE or not self._pool_layers:
            return
        translator = self.kv_index_translator or self.env.translator
        for key in dict.fromkeys(self._pool_key(layer, batch) for layer in self._pool_layers):
            tree = TreeCells.of(batch, key.window) if key.causal else None
            if tree is not None:
                step.trees.append(tree)
            if batch.uses_graph_buffers:
                read, most = PaddedRead.of(batch, key, translator, tree), self._options.max_gather_tokens
                step.tiles[key] = fixed_tiles(read, batch, self._columns[key], self._buffers.of(batch, key), most)
            else:
                step.tiles[key] = plan_pool(batch, step, key, self.env.kv_pool, translator, tree, self._options)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Reserve slots, lengths and masks for every way of reading, over the longest context."""
        width = -(-max_num_tokens // max_bs)
        for layer in self._pool_layers:
            crossing = layer.is_cross_attention
            space = KVSpace.ENCODER if crossing else self.env.kv_pool.space_of(layer.layer_id)
            key = ReadKey(space, layer.sliding_window_size, is_causal(layer, ForwardMode.DECODE))
            if key not in self._columns:
                n = self._most_columns(layer, width)
                self._columns[key] = n
                self._buffers.reserve([key], buffer_specs(max_bs, max_num_tokens, n), owner=self.name)

    def _most_columns(self, layer: LayerSpec, width: int) -> int:
        longest, window = self.env.limits.max_context_len, layer.sliding_window_size
        return min(longest, window + width) if window >= 0 and not layer.is_cross_attention else longest

    @property
    def graph_level(self) -> GraphLevel:
        """The declared level, or NONE where captured reads would span more than ``max_graph_context_len`` keys."""
        columns = max((self._most_columns(layer, 1) for layer in self._pool_layers), default=0)
        return SPEC.graph_level if columns <= self._options.max_graph_context_len else GraphLevel.NONE

    def metadata_capture_refusal(self, mode: ForwardMode) -> str:
        """Decode is planned on the device alone; a verify mask's first row and all other lengths are the host's."""
        if mode.is_decode:
            return ""
        if mode.is_target_verify:
            return f"{self.name} reads the verify mask from a row that the host names"
        return f"{self.name} shapes {mode.value} by host lengths"

    def shared_read_ends(self, mode: ForwardMode) -> SharedReadEnds:
        """Slots, lengths and tree masks are copied when metadata is made; a forward reads pool and rows only."""
        return SharedReadEnds.PRE_REPLAY

    def update_verify_buffers_to_fill_after_draft(self, spec_info: SpecInfo, bs: int) -> None:
        for tree in () if self.forward_metadata is None else self.forward_metadata.trees:
            tree.refresh()

    # Execution

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
        return self.forward_extend(q, k, v, layer, batch, save_kv_cache, extras)

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
        """Run one layer, in any mode: what differs between them is in the tiles."""
        extras = extras or AttentionExtras()
        if layer.kind is Kind.MLA:
            return self._mla(q, k, v, layer, batch, save_kv_cache, extras)
        check_call(self.name, q, k, v, layer, save_kv_cache)
        dtype = output_dtype(q, v)
        if layer.attn_type is AttentionType.ENCODER_ONLY:
            return self._attend(q, _rows(k, v), self._row_tiles(layer, batch), layer, extras, dtype)
        new = None
        if k is not None and v is not None:
            if save_kv_cache:
                self.env.kv_pool.set_kv_buffer(layer, KVWriteLoc.for_layer(batch, layer), k, v)
            else:
                new = (k, v)
        source = self._pool_source(layer, batch, new)
        return self._attend(q, source, self._pool_tiles(layer, batch), layer, extras, dtype)

    def _mla(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool,
        extras: AttentionExtras,
    ) -> AttentionOutput:
        check_mla(self.name, q, k, v, layer, extras)
        latent, rope = extras.latent, extras.k_rope
        rows = None
        if latent is not None and rope is not None:
            if save_kv_cache:
                self.env.kv_pool.set_kv_buffer(layer, KVWriteLoc.for_layer(batch, layer), latent, rope)
            else:
                rows = torch.cat([latent.flatten(1), rope.flatten(1)], -1).unsqueeze(1)
        if extras.mla_form is MlaForm.ABSORBED:
            assert extras.q_nope is not None
            assert extras.q_rope is not None
            query = torch.cat([extras.q_nope, extras.q_rope], -1)
            source = self._pool_source(layer, batch, None if rows is None else (rows, rows))
            dtype = output_dtype(extras.q_nope, None)
            return self._attend(query, source, self._pool_tiles(layer, batch), layer, extras, dtype)
        if extras.mla_form is MlaForm.ONE_SHOT:
            return self._attend(q, _rows(k, v), self._row_tiles(layer, batch), layer, extras, output_dtype(q, v))
        step, lens = self._step(), extras.chunk_lens_cpu or ()
        tiles = step.chunks.get(lens)
        if tiles is None:
            tiles = step.chunks[lens] = plan_chunk(step, lens)
        return self._attend(q, _rows(k, v), tiles, layer, extras, output_dtype(q, v))

    def _attend(
        self,
        q: Tensor,
        source: Source,
        tiles: tuple[Tile, ...],
        layer: AttentionLayer,
        extras: AttentionExtras,
        dtype: torch.dtype,
    ) -> AttentionOutput:
        pooled = isinstance(source, PoolSource)
        latent = pooled and layer.kind is Kind.MLA
        heads, width = q.shape[1], layer.kv_lora_rank if latent else source.value_width
        k_scale = layer.k_scale if pooled else 1.0
        scores = Scores(
            layer.scaling * k_scale,
            layer.logit_cap,
            None if layer.sinks is None or extras.return_lse else layer.sinks.view(source.kv_heads, -1),
            (layer.k_scale if latent else layer.v_scale) if pooled else 1.0,
        )
        plain = not (scores.cap or scores.sinks is not None or extras.return_lse or self._unfused)
        compute = compute_dtype(q.dtype, source.dtype)
        q = q.to(compute)
        out = torch.zeros((q.shape[0], heads, width), dtype=dtype, device=q.device)
        lse = None
        if extras.return_lse:
            lse = torch.full((q.shape[0], heads), float("-inf"), dtype=torch.float32, device=q.device)
        for tile in tiles:
            keys, values = source.read(tile)
            state = self._attend_tile(
                select_rows(q, tile.rows).view(tile.count, tile.t, heads, -1),
                keys.to(compute),
                values.to(compute),
                tile.visibility,
                tile.mask,
                scores,
                explicit=not plain,
                may_see_nothing=tile.may_see_nothing,
                return_lse=extras.return_lse,
                max_cells=self._options.max_score_cells,
            )
            out[tile.rows] = state.out.flatten(0, 1).to(dtype)
            if lse is not None and state.lse is not None:
                lse[tile.rows] = state.lse.flatten(0, 1).to(torch.float32)
        return AttentionOutput(out, lse)

    # Plans and sources

    def _step(self) -> StepMetadata:
        if self.forward_metadata is None:
            raise ContractViolation(
                f"backend {self.name!r} was run before its metadata was made",
                remedy="call init_forward_metadata(batch) once a step, before the layers",
            )
        return self.forward_metadata

    def _pool_key(self, layer: AttentionLayer | LayerSpec, batch: ForwardBatch) -> ReadKey:
        if batch.kv_loc_plan is None:
            raise ContractViolation(
                "the batch has no kv_loc_plan, so no slot can be read",
                remedy="make it with KVIndexTranslator.plan(...) before the step's metadata",
            )
        crossing = layer.is_cross_attention
        space = KVSpace.ENCODER if crossing else batch.kv_loc_plan.space_of(layer.layer_id)
        return ReadKey(space, layer.sliding_window_size, is_causal(layer, batch.forward_mode))

    def _pool_tiles(self, layer: AttentionLayer, batch: ForwardBatch) -> tuple[Tile, ...]:
        tiles = self._step().tiles.get(self._pool_key(layer, batch))
        if tiles is None:
            raise ContractViolation(
                f"layer {layer.layer_id} reads as no layer of {self.env.model_spec.name!r} does, and has no plan",
                remedy="build the backend with a ModelSpec that holds every layer it serves",
            )
        return tiles

    def _row_tiles(self, layer: AttentionLayer, batch: ForwardBatch) -> tuple[Tile, ...]:
        step = self._step()
        key = ReadKey(None, layer.sliding_window_size, is_causal(layer, batch.forward_mode))
        tiles = step.tiles.get(key)
        if tiles is None:
            tiles = step.tiles[key] = plan_rows(step, key)
        return tiles

    def _pool_source(self, layer: AttentionLayer, batch: ForwardBatch, new: tuple[Tensor, Tensor] | None) -> PoolSource:
        pool = self.env.kv_pool
        keys, values = pool.get_kv_buffer(layer.layer_id)
        mla = layer.kind is Kind.MLA
        return PoolSource(
            keys,
            values,
            head_major=pool.layout == "HND",
            page_size=pool.page_size,
            # A kept buffer may move when a longer step comes; a graph's temporaries are the graph's.
            workspace=None if batch.uses_graph_buffers else self._workspace,
            latent_width=layer.kv_lora_rank if mla else 0,
            new=new,
            scales=(layer.k_scale, layer.k_scale if mla else layer.v_scale),
        )

    def close(self) -> None:
        self._workspace.clear()


def _rows(k: Tensor | None, v: Tensor | None) -> RowSource:
    assert k is not None  # checked before
    assert v is not None
    return RowSource(k, v)
