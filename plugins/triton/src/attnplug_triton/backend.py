"""The Triton backend: a step's metadata, then one layer at a time into the launchers. It holds no mathematics."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug.assembly.env import BackendEnv
from attnplug.attention_io import AttentionExtras, AttentionOutput
from attnplug.backend import AttentionBackend
from attnplug.batch import ForwardBatch
from attnplug.errors import BackendRejected, ContractViolation, Reason
from attnplug.kv.pools import check_loc
from attnplug.kv.write_loc import KVWriteLoc
from attnplug.layer import AttentionLayer, output_dtype
from attnplug.masks.verify import TreeMaskMode
from attnplug.modes import AttentionType, ForwardMode, KVSpace, MlaForm, SharedReadEnds
from attnplug.spec import BackendSpec, Kind

from .checks import check_call, check_mla
from .decode_path import DecodePath
from .extend_path import Call, ExtendPath
from .kernels.args import Keys, Rules, Table, Tree, Widths
from .kernels.extend_launch import NewRows
from .kernels.kv_write import write_kv
from .metadata import TritonMetadata
from .options import TritonOptions
from .planner import Planner, spaces_of
from .spec import SPEC


class TritonBackend(AttentionBackend):
    """Decode and verify with keys shared out over the card; extend in one loop over prefix and new tokens.

    Metadata launches nothing: kernels read lengths and slots where the scheduler put them, so the shared tensors are
    read until a forward ends. Only a tree of drafts has something to prepare, on the device.

    Args:
        env: Where it runs.
        options: Bounds and choices.
        spec: What it declares; ``interpreted`` gives another.
    """

    forward_metadata: TritonMetadata | None

    def __init__(self, env: BackendEnv, options: TritonOptions | None = None, *, spec: BackendSpec = SPEC) -> None:
        super().__init__(spec, env)
        options = options or TritonOptions()
        self._capability, sms = 0, 4
        if env.device.type == "cuda":
            facts = torch.cuda.get_device_properties(env.device)
            sms, self._capability = facts.multi_processor_count, 10 * facts.major + facts.minor
            self._check_fp8()
        self._extends = ExtendPath(env, self._capability, options)
        self._decodes = DecodePath(env, self._capability, options)
        self._planner = Planner(env, options, sms)
        self._pool_layers = tuple(layer for layer in env.model_spec.layers if layer.reads_pool)
        self.kv_index_translator = env.translator

    def _check_fp8(self) -> None:
        capability = self._capability
        if self.env.kv_dtype == torch.float8_e4m3fn and capability < 89:
            reason = Reason("kv_dtype", f"float8_e4m3fn on sm_{capability}", "float8_e5m2; float8_e4m3fn from sm_89 on")
            raise BackendRejected(
                f"backend {self.name!r} cannot be built for this environment",
                reasons={self.name: [reason]},
                remedy="set kv_dtype = 'float8_e5m2' or 'bfloat16'",
            )

    # Metadata

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        mode = batch.forward_mode
        uniform = batch.draft_token_num if mode.is_target_verify else 1 if mode.is_decode else 0
        step = TritonMetadata(
            mode,
            batch.batch_size,
            uniform,
            batch.extend_seq_lens if uniform == 0 else None,
            uniform or batch.max_query_len,
            None if uniform or batch.uses_graph_buffers else batch.extend_seq_lens_cpu,
            extra_len=batch.draft_token_num,
        )
        self.forward_metadata = step
        if mode is ForwardMode.IDLE or not self._pool_layers:
            return
        if batch.kv_loc_plan is None:
            raise ContractViolation(
                "the batch has no kv_loc_plan, so no slot can be read",
                remedy="make it with KVIndexTranslator.plan(...) before the step's metadata",
            )
        translator = self.kv_index_translator or self.env.translator
        for space in spaces_of(batch, self._pool_layers):
            source = translator.read_source(batch.kv_loc_plan, space)
            step.tables[space] = Table(source.ids, source.row_ids, source.entry_page_size, self.env.page_size)
        if uniform:
            step.plans = self._planner.plan(batch, uniform)
            step.attn_logits, step.attn_lse = self._planner.scratch(batch, uniform, step.plans)
        info = batch.spec_info
        if mode.is_target_verify and info is not None and info.mask is not None:
            full = info.mask.mode is TreeMaskMode.FULL_MASK
            step.tree = Tree(info.mask.buffer, self._planner.tree_start(batch), batch.positions, full)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        step, info = self.forward_metadata, batch.spec_info
        if step is None or step.tree is None or info is None or info.mask is None:
            return
        lens = batch.seq_lens if info.mask_seq_lens is None else info.mask_seq_lens
        step.tree.start.copy_(info.mask.indptr(lens)[info.mask_row : info.mask_row + batch.batch_size])

    def shared_read_ends(self, mode: ForwardMode) -> SharedReadEnds:
        """Kernels walk the scheduler's rows and lengths themselves, so these are read until the forward has ended."""
        return SharedReadEnds.POST_REPLAY

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._planner.reserve(max_bs, max_num_tokens)

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
        """Run one layer, in any mode: steps of one width share keys out, the others run by tiles of query rows."""
        want_lse = extras is not None and extras.return_lse
        if layer.kind is Kind.MLA:
            return self._mla(q, k, v, layer, batch, save_kv_cache, extras or AttentionExtras())
        check_call(self.name, q, k, v, layer, save_kv_cache)
        call = self._call(q, layer, batch, Widths(layer.head_dim, layer.v_head_dim), output_dtype(q, v), want_lse)
        if layer.attn_type is AttentionType.ENCODER_ONLY:
            assert k is not None  # checked before
            assert v is not None
            return self._extend(call, None, NewRows(_columns(k), _columns(v)))
        keys, values = self.env.kv_pool.get_kv_buffer(layer.layer_id)
        new = None
        if k is not None and v is not None:
            if save_kv_cache:
                self._write(layer, batch, k, v, keys, values, layer.v_scale)
            else:
                new = NewRows(_columns(k), _columns(v))
        return self._read(call, keys, values, new)

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
        rows, latents = self.env.kv_pool.get_kv_buffer(layer.layer_id)
        latent, rope, rank = extras.latent, extras.k_rope, layer.kv_lora_rank
        new = None
        if latent is not None and rope is not None:
            if save_kv_cache:
                parts = (latent.unsqueeze(1), rope.unsqueeze(1), latents, rows[..., rank:])
                self._write(layer, batch, *parts, layer.k_scale)
            elif extras.mla_form is MlaForm.ABSORBED:
                joined = torch.cat([latent, rope], -1).unsqueeze(1)
                new = NewRows(joined, joined[..., :rank])
        if extras.mla_form is MlaForm.ABSORBED:
            assert extras.q_nope is not None  # checked before
            assert extras.q_rope is not None
            widths = Widths(rank, rank, layer.qk_rope_head_dim)
            dtype = output_dtype(extras.q_nope, None)
            call = self._call(extras.q_nope, layer, batch, widths, dtype, extras.return_lse)
            return self._read(call._replace(q_rope=_columns(extras.q_rope)), rows, latents, new)
        assert k is not None  # checked before
        assert v is not None
        call = self._call(q, layer, batch, Widths(q.shape[2], v.shape[2]), output_dtype(q, v), extras.return_lse)
        chunk = extras.chunk_indptr if extras.mla_form is MlaForm.CHUNKED_PREFIX else None
        return self._extend(call, None, NewRows(_columns(k), _columns(v), chunk))

    def _call(
        self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch, widths: Widths, dtype: torch.dtype, want_lse: bool
    ) -> Call:
        tokens, heads = q.shape[0], q.shape[1]
        out = torch.empty((tokens, heads, widths.dv), dtype=dtype, device=q.device)
        lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device) if want_lse else None
        return Call(_columns(q), layer, batch, widths, out, lse)

    def _write(
        self,
        layer: AttentionLayer,
        batch: ForwardBatch,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        values: Tensor,
        v_scale: float,
    ) -> None:
        loc = KVWriteLoc.for_layer(batch, layer)
        check_loc(loc, self.env.kv_pool.space_of(layer.layer_id), k.shape[0], layer.layer_id)
        write_kv(k, v, keys, values, loc.slots, k_scale=layer.k_scale, v_scale=v_scale)

    def _read(self, call: Call, keys: Tensor, values: Tensor, new: NewRows | None) -> AttentionOutput:
        step, layer, batch = self._step(), call.layer, call.batch
        crossing = layer.is_cross_attention
        assert batch.kv_loc_plan is not None  # checked when metadata was made
        space = KVSpace.ENCODER if crossing else batch.kv_loc_plan.space_of(layer.layer_id)
        table = step.tables.get(space)
        if table is None:
            raise ContractViolation(
                f"layer {layer.layer_id} reads the {space.value} space; no layer of {self.env.model_spec.name!r} does",
                remedy="build the backend with a ModelSpec that holds every layer it serves",
            )
        lens = batch.kv_lens(space) if crossing else batch.seq_lens
        source = Keys(keys, values, table, lens, 0 if crossing else step.extra_len)
        plan = step.plans.get(layer.group)
        if new is not None or plan is None:
            return self._extend(call, source, new)
        self._decodes.run(call, step, self._rules(call, step), source, plan)
        return AttentionOutput(call.out, call.lse)

    def _extend(self, call: Call, source: Keys | None, new: NewRows | None) -> AttentionOutput:
        by_chunk = new is not None and new.indptr is not None
        step = self._step()
        self._extends.run(call, step, self._rules(call, step, by_chunk), source, new)
        return AttentionOutput(call.out, call.lse)

    def _rules(self, call: Call, step: TritonMetadata, by_chunk: bool = False) -> Rules:
        layer = call.layer
        sinks = None if call.lse is not None else layer.sinks
        causal = layer.causal and step.mode is not ForwardMode.DLLM_EXTEND and not by_chunk
        return Rules(
            layer.scaling,
            layer.logit_cap,
            layer.sliding_window_size,
            causal,
            None if sinks is None else sinks.float(),
            layer.k_scale,
            layer.v_scale,
            step.tree if causal else None,
        )

    def _step(self) -> TritonMetadata:
        if self.forward_metadata is None:
            raise ContractViolation(
                f"backend {self.name!r} was run before its metadata was made",
                remedy="call init_forward_metadata(batch) once a step, before the layers",
            )
        return self.forward_metadata

    def close(self) -> None:
        self._planner.close()


def _columns(x: Tensor) -> Tensor:
    """Return rows whose last dimension is contiguous, as the kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()
