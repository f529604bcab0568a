"""Fakes for the contract's hardest users: a plan/run library, a backend with state, and the world around them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug.assembly.env import BackendEnv, Limits
from attnplug.attention_io import AttentionExtras, AttentionOutput
from attnplug.backend import AttentionBackend
from attnplug.batch import ForwardBatch, LinearState
from attnplug.kv.pools import MHAKVPool
from attnplug.kv.translator import KVIndexTranslator
from attnplug.kv.write_loc import KVWriteLoc
from attnplug.layer import AttentionLayer
from attnplug.model_spec import LayerGroup, LayerSpec, ModelSpec
from attnplug.modes import ForwardMode, GraphLevel, KVSpace, SharedReadEnds
from attnplug.spec import BackendSpec, Feature, Kind

WINDOW = 3
MAX_CONTEXT = 24
MAX_BS = 6
LAYERS = (
    LayerSpec(layer_id=0, num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=8, sliding_window_size=WINDOW),
    LayerSpec(layer_id=1, kind=Kind.LINEAR, linear_family="fake", num_heads=2, head_dim=4, v_head_dim=4),
    LayerSpec(layer_id=2, num_heads=6, num_kv_heads=2, head_dim=8, v_head_dim=8),
)
MODEL = ModelSpec(name="spike", layers=LAYERS, dtype="float64", max_context_len=MAX_CONTEXT)
MODES = frozenset({ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.IDLE})
LIBRARY_SPEC = BackendSpec(
    name="library",
    device_types=frozenset({"cpu"}),
    modes=MODES,
    dtypes=frozenset({"float64"}),
    kv_dtypes=frozenset({"float64"}),
    features=frozenset({Feature.SLIDING_WINDOW, Feature.HETEROGENEOUS_LAYERS}),
    graph_level=GraphLevel.DECODE,
)
LINEAR_SPEC = LIBRARY_SPEC.replace(
    name="linear",
    kinds=frozenset({Kind.LINEAR}),
    linear_families=frozenset({"fake"}),
    features=frozenset(),
    needs_cpu_seq_lens=False,
)


class Plan:
    """One wrapper of the library: buffers, and what was baked in when it was planned."""

    def __init__(self, group: LayerGroup, max_bs: int) -> None:
        self.group = group
        self.indptr = torch.zeros(max_bs + 1, dtype=torch.int32)
        self.indices = torch.zeros(max_bs * MAX_CONTEXT, dtype=torch.int32)
        self.num_qo_heads = 0
        self.window_left = -1
        self.starts = torch.zeros(max_bs, dtype=torch.int64)


@dataclass(slots=True)
class LibraryMetadata:
    """A step: one plan a layer group."""

    plans: dict[LayerGroup, Plan]


class PlanRunBackend(AttentionBackend):
    """As a library with plan() and run(): the head count is baked into a plan, reads go through planned indices."""

    def __init__(self, env: BackendEnv, name: str) -> None:
        super().__init__(LIBRARY_SPEC.replace(name=name), env)
        self.calls: list[tuple[str, int]] = []
        self.graph_plans: dict[LayerGroup, Plan] = {}
        self.groups = [g for g in env.model_spec.groups if g.kind is Kind.SOFTMAX]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.graph_plans = {group: Plan(group, max_bs) for group in self.groups}

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        assert batch.seq_lens_cpu is not None
        plans = (
            self.graph_plans
            if batch.uses_graph_buffers
            else {group: Plan(group, batch.batch_size) for group in self.groups}
        )
        for group, plan in plans.items():
            plan.num_qo_heads, plan.window_left = group.num_heads, group.sliding_window_size
        self.forward_metadata = LibraryMetadata(plans)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        assert self.kv_index_translator is not None
        assert batch.kv_loc_plan is not None
        for group, plan in self.forward_metadata.plans.items():
            start = batch.kv_start_idx(group.sliding_window_size)
            plan.starts[: batch.batch_size].copy_(start)
            self.kv_index_translator.pack_read_stream(
                batch.kv_loc_plan,
                seq_lens=batch.kv_lens() - start,
                indptr=plan.indptr[: batch.batch_size + 1],
                out=plan.indices[: batch.batch_size * MAX_CONTEXT],
                kv_start_idx=start,
                kind=KVSpace.FULL,
            )

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
        return self.run(q, k, v, layer, batch, torch.arange(batch.batch_size))

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
        lens = torch.tensor(batch.query_lens_cpu)
        return self.run(q, k, v, layer, batch, torch.repeat_interleave(torch.arange(batch.batch_size), lens))

    def run(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        row_of: Tensor,
    ) -> AttentionOutput:
        """Attend by the planned indices, every query over its request's whole list, masked by position."""
        self.calls.append((batch.forward_mode.value, layer.layer_id))
        plan = self.forward_metadata.plans[layer.group]
        assert plan.num_qo_heads >= layer.num_heads, "planned for fewer heads than the layer has"
        assert k is not None
        assert v is not None
        self.env.kv_pool.set_kv_buffer(layer, KVWriteLoc.for_layer(batch, layer), k, v)
        keys, values = self.env.kv_pool.get_kv_buffer(layer.layer_id)
        starts, ends = plan.indptr[:-1].long()[row_of], plan.indptr[1:].long()[row_of]
        lane = torch.arange(MAX_CONTEXT)
        entry = starts[:, None] + lane
        slots = plan.indices[entry.clamp_max(plan.indices.numel() - 1)].long()
        group = layer.num_heads // layer.num_kv_heads
        grouped = q.view(q.shape[0], layer.num_kv_heads, group, layer.head_dim)
        scores = torch.einsum("thgd,tshd->thgs", grouped, keys[slots]) * layer.scaling
        at = plan.starts[row_of][:, None] + lane
        seen = (entry < ends[:, None]) & (at <= batch.positions[:, None])
        if plan.window_left >= 0:
            seen = seen & (at >= batch.positions[:, None] - plan.window_left)
        scores = scores.masked_fill(~seen[:, None, None, :], float("-inf"))
        out = torch.einsum("thgs,tshd->thgd", torch.softmax(scores, -1), values[slots])
        return AttentionOutput(out.reshape(q.shape[0], layer.num_heads, layer.v_head_dim))

    def shared_read_ends(self, mode: ForwardMode) -> SharedReadEnds:
        return SharedReadEnds.IN_REPLAY


class StateBackend(AttentionBackend):
    """Linear attention with one decaying state a request; slot -1 is skipped."""

    def __init__(self, env: BackendEnv, states: Tensor) -> None:
        super().__init__(LINEAR_SPEC, env)
        self.states = states

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing: the batch's own state slots have a fixed address under a graph."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        assert batch.state is not None
        self.forward_metadata = batch.state

    def _slots(self, state: LinearState) -> Tensor:
        # Row 0 is reserved: what padding writes there is read by nobody.
        return state.slots.clamp_min(0).long()

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
        assert k is not None
        assert v is not None
        slots = self._slots(self.forward_metadata)
        state = 0.5 * self.states[slots] + k[..., :, None] * v[..., None, :]
        self.states.index_copy_(0, slots, state)
        return AttentionOutput(torch.einsum("bhk,bhkv->bhv", q, state))

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
        assert k is not None
        assert v is not None
        outs, row = [], 0
        for b, n in enumerate(batch.query_lens_cpu):
            slot = int(self._slots(self.forward_metadata)[b])
            if not bool(self.forward_metadata.has_initial_state[b]):
                self.states[slot] = 0
            for t in range(row, row + n):
                self.states[slot] = 0.5 * self.states[slot] + k[t][:, :, None] * v[t][:, None, :]
                outs.append(torch.einsum("hk,hkv->hv", q[t], self.states[slot]))
            row += n
        return AttentionOutput(torch.stack(outs))

    def shared_read_ends(self, mode: ForwardMode) -> SharedReadEnds:
        return SharedReadEnds.POST_REPLAY


class World:
    """A pool, a table with scattered slots, layers, and batches over them."""

    def __init__(self) -> None:
        self.pool = MHAKVPool(LAYERS, num_pages=200, page_size=1, dtype=torch.float64, device="cpu")
        self.req_to_token = torch.zeros(MAX_BS + 1, MAX_CONTEXT, dtype=torch.int32)
        order = torch.randperm(199, generator=torch.Generator().manual_seed(1)) + 1
        self.req_to_token[1:] = order[: MAX_BS * MAX_CONTEXT].view(MAX_BS, MAX_CONTEXT).int()
        self.translator = KVIndexTranslator(self.pool, self.req_to_token)
        self.env = BackendEnv(
            device=torch.device("cpu"),
            dtype=torch.float64,
            kv_dtype=torch.float64,
            page_size=1,
            req_to_token=self.req_to_token,
            kv_pool=self.pool,
            translator=self.translator,
            model_spec=MODEL,
            limits=Limits(max_batch_size=MAX_BS, max_num_tokens=MAX_BS * MAX_CONTEXT, max_context_len=MAX_CONTEXT),
        )
        self.layers = [AttentionLayer.from_spec(layer) for layer in LAYERS if layer.kind is Kind.SOFTMAX]
        self.layers.insert(1, AttentionLayer(2, 4, 1.0, 2, 1, kind=Kind.LINEAR, linear_family="fake"))

    def batch(self, mode: ForwardMode, lens: list[int], new: list[int]) -> ForwardBatch:
        """Requests 1 … B with these lengths after the step, of which the last ``new`` are this step's."""
        n, tokens = torch.tensor(lens), sum(new)
        rows = torch.arange(1, len(lens) + 1)
        positions = torch.cat([torch.arange(a - b, a) for a, b in zip(lens, new, strict=True)])
        slots = self.req_to_token[torch.repeat_interleave(rows, torch.tensor(new)), positions].long()
        extend = mode.is_extend
        prefix = [a - b for a, b in zip(lens, new, strict=True)]
        starts = torch.cumsum(torch.tensor(new), 0) - torch.tensor(new)
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(lens),
            req_pool_indices=rows,
            seq_lens=n,
            seq_lens_cpu=n.clone(),
            seq_lens_sum=sum(lens),
            max_seq_len=max(lens),
            positions=positions,
            out_cache_loc=slots,
            extend_seq_lens=torch.tensor(new, dtype=torch.int32) if extend else None,
            extend_prefix_lens=torch.tensor(prefix, dtype=torch.int32) if extend else None,
            extend_start_loc=starts.int() if extend else None,
            extend_seq_lens_cpu=tuple(new) if extend else None,
            extend_prefix_lens_cpu=tuple(prefix) if extend else None,
            extend_num_tokens=tokens if extend else 0,
            kv_loc_plan=self.translator.plan(req_pool_indices=rows, out_cache_loc=slots),
            state=LinearState(slots=rows.int(), has_initial_state=torch.tensor([p > 0 for p in prefix])),
        )
