"""The contract's hardest users together: plan/run with two layer groups, in a prefill/decode hybrid, in a
linear-attention router, in two-batch overlap, through one emulated graph that is replayed with other lengths."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from attnplug.backend import AttentionBackend
from attnplug.batch import ForwardBatch
from attnplug.context import ForwardContext, forward_context
from attnplug.graphs.buffers import BatchBuffers
from attnplug.graphs.emulated import EmulatedGraph
from attnplug.modes import ForwardMode, SharedReadEnds
from attnplug.wrappers.composite import JoinedMetadata
from attnplug.wrappers.hybrid import HybridAttnBackend
from attnplug.wrappers.hybrid_linear import HybridLinearAttnBackend
from attnplug.wrappers.two_batch import TwoBatchOverlapBackend

from .spike_world import LAYERS, MAX_BS, MAX_CONTEXT, WINDOW, PlanRunBackend, StateBackend, World

HIDDEN = 12


class Projections(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


def projections() -> list[Projections]:
    g = torch.Generator().manual_seed(7)
    made = []
    for layer in LAYERS:
        heads, kv, dim = layer.num_heads, layer.num_kv_heads or layer.num_heads, layer.head_dim
        shapes = ((HIDDEN, heads * dim), (HIDDEN, kv * dim), (HIDDEN, kv * dim), (heads * dim, HIDDEN))
        made.append(Projections(*(torch.randn(s, generator=g, dtype=torch.float64) / s[0] ** 0.5 for s in shapes)))
    return made


WEIGHTS = projections()


def model(world: World, x: Tensor, batch: ForwardBatch) -> Tensor:
    """Three layers, each called as a model calls them."""
    for layer, w in zip(world.layers, WEIGHTS, strict=True):
        q, k, v = ((x @ m).view(x.shape[0], -1, layer.head_dim) for m in (w.q, w.k, w.v))
        x = x + layer(q, k, v, batch).out.flatten(1) @ w.out
    return x


def oracle(xs: Tensor) -> Tensor:
    """One request in one dense pass over all its tokens, independent of backends, pools and batches."""
    n = xs.shape[0]
    at = torch.arange(n)
    for layer, w in zip(LAYERS, WEIGHTS, strict=True):
        q, k, v = ((xs @ m).view(n, -1, layer.head_dim) for m in (w.q, w.k, w.v))
        if layer.kind.value == "linear":
            state, rows = torch.zeros(2, 4, 4, dtype=xs.dtype), []
            for t in range(n):
                state = 0.5 * state + k[t][:, :, None] * v[t][:, None, :]
                rows.append(torch.einsum("hk,hkv->hv", q[t], state))
            out = torch.stack(rows)
        else:
            seen = at[None, :] <= at[:, None]
            if layer.sliding_window_size >= 0:
                seen &= at[None, :] >= at[:, None] - WINDOW
            wide = layer.num_heads // layer.num_kv_heads
            k, v = k.repeat_interleave(wide, 1), v.repeat_interleave(wide, 1)
            scores = torch.einsum("thd,shd->hts", q, k).masked_fill(~seen, float("-inf"))
            out = torch.einsum("hts,shd->thd", scores.softmax(-1), v)
        xs = xs + out.flatten(1) @ w.out
    return xs


class Built(NamedTuple):
    root: TwoBatchOverlapBackend
    leaves: dict[str, PlanRunBackend]


def build(world: World) -> Built:
    states = torch.zeros(MAX_BS + 1, 2, 4, 4, dtype=torch.float64)
    leaves = {name: PlanRunBackend(world.env, name) for name in ("prefill0", "decode0", "prefill1", "decode1")}

    def side(i: int) -> AttentionBackend:
        pair = HybridAttnBackend(leaves[f"prefill{i}"], leaves[f"decode{i}"])
        return HybridLinearAttnBackend(pair, StateBackend(world.env, states), full_attn_layers=(0, 2))

    root = TwoBatchOverlapBackend(side(0), side(1))
    world.translator.bind_and_verify_backends([root])
    return Built(root, leaves)


@pytest.fixture
def tokens() -> Tensor:
    """Inputs of six requests, [MAX_BS, MAX_CONTEXT, HIDDEN]."""
    return torch.randn(MAX_BS, MAX_CONTEXT, HIDDEN, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def rows_of(tokens: Tensor, lens: list[int], new: list[int]) -> Tensor:
    return torch.cat([tokens[b, n - m : n] for b, (n, m) in enumerate(zip(lens, new, strict=True))])


def expected(tokens: Tensor, lens: list[int], new: list[int]) -> Tensor:
    return torch.cat([oracle(tokens[b, :n])[n - m :] for b, (n, m) in enumerate(zip(lens, new, strict=True))])


def eager(
    world: World, root: AttentionBackend, tokens: Tensor, mode: ForwardMode, lens: list[int], new: list[int]
) -> Tensor:
    batch = world.batch(mode, lens, new)
    batch.validate_values(num_slots=world.pool.num_slots, max_context_len=MAX_CONTEXT)
    with torch.no_grad(), forward_context(ForwardContext(root)):
        root.init_forward_metadata(batch)
        return model(world, rows_of(tokens, lens, new), batch)


class DecodeGraph:
    """What a graph runner does, by hand: fixed buffers, warm-up, capture at one size, refresh and replay."""

    def __init__(self, world: World, root: AttentionBackend, bs: int) -> None:
        self.world, self.root, self.bs = world, root, bs
        self.buffers = BatchBuffers(MAX_BS, MAX_BS, torch.device("cpu"))
        root.init_cuda_graph_state(MAX_BS, MAX_BS)
        self.x = torch.zeros(bs, HIDDEN, dtype=torch.float64)
        # A batch of padding alone: capture runs once over rows and slots that belong to nobody.
        dummy = world.batch(ForwardMode.DECODE, [1], [1]).slice(0, 0)
        view = self._view(dummy)
        self.graph = EmulatedGraph()
        with forward_context(ForwardContext(root)):
            root.init_forward_metadata_out_graph(view, in_capture=True)
            with self.graph.capture():
                root.init_forward_metadata_in_graph(view)
                self.out = model(world, self.x, view)
        root.on_after_cuda_graph_warmup()

    def _view(self, batch: ForwardBatch) -> ForwardBatch:
        fill = self.root.get_cuda_graph_seq_len_fill_value()
        return batch.pad(self.bs, seq_len_fill=fill).replay_view(self.buffers)

    def replay(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        self.x.zero_()
        self.x[: x.shape[0]] = x
        self.root.init_forward_metadata_out_graph(self._view(batch))
        self.graph.replay()
        return self.out[: x.shape[0]].clone()


def test_prefill_chunk_and_decode_equal_a_dense_pass(tokens: Tensor) -> None:
    world = World()
    root, leaves = build(world)
    lens = [5, 9, 2, 7]
    torch.testing.assert_close(eager(world, root, tokens, ForwardMode.EXTEND, lens, lens), expected(tokens, lens, lens))
    grown, new = [8, 10, 9, 9], [3, 1, 7, 2]
    torch.testing.assert_close(eager(world, root, tokens, ForwardMode.EXTEND, grown, new), expected(tokens, grown, new))
    lens, new = [n + 1 for n in grown], [1] * 4
    torch.testing.assert_close(eager(world, root, tokens, ForwardMode.DECODE, lens, new), expected(tokens, lens, new))
    for name, leaf in leaves.items():
        assert {mode for mode, _ in leaf.calls} == {"extend" if name.startswith("prefill") else "decode"}
        assert {layer_id for _, layer_id in leaf.calls} == {0, 2}


def test_one_captured_decode_is_replayed_with_other_lengths_and_smaller_batches(tokens: Tensor) -> None:
    world = World()
    root, leaves = build(world)
    lens = [5, 9, 2, 7]
    eager(world, root, tokens, ForwardMode.EXTEND, lens, lens)
    graph = DecodeGraph(world, root, bs=4)
    calls = {name: len(leaf.calls) for name, leaf in leaves.items()}
    for step in range(5):
        count = 4 if step != 3 else 3  # A smaller batch in between, padded to the bucket.
        lens = [n + 1 if b < count else n for b, n in enumerate(lens)]
        batch = world.batch(ForwardMode.DECODE, lens[:count], [1] * count)
        out = graph.replay(rows_of(tokens, lens[:count], [1] * count), batch)
        torch.testing.assert_close(out, expected(tokens, lens[:count], [1] * count))
    assert {name: len(leaf.calls) for name, leaf in leaves.items()} == calls, "a replay ran a backend's Python"


def test_a_replay_that_skips_the_refresh_is_wrong(tokens: Tensor) -> None:
    """The check above can fail: stale metadata gives other numbers."""
    world = World()
    root, _ = build(world)
    lens = [5, 9, 2, 7]
    eager(world, root, tokens, ForwardMode.EXTEND, lens, lens)
    graph = DecodeGraph(world, root, bs=4)
    lens = [n + 1 for n in lens]
    graph.x.copy_(rows_of(tokens, lens, [1] * 4))
    graph.graph.replay()
    assert not torch.allclose(graph.out, expected(tokens, lens, [1] * 4))


def test_metadata_of_every_leaf_is_snapshot_and_restored(tokens: Tensor) -> None:
    world = World()
    root, leaves = build(world)
    eager(world, root, tokens, ForwardMode.EXTEND, [5, 9], [5, 9])
    kept = root.forward_metadata
    assert isinstance(kept, JoinedMetadata)
    before = {name: leaf.forward_metadata for name, leaf in leaves.items()}
    eager(world, root, tokens, ForwardMode.DECODE, [6, 10], [1, 1])
    assert leaves["decode0"].forward_metadata is not before["decode0"]
    root.forward_metadata = kept
    assert {name: leaf.forward_metadata for name, leaf in leaves.items()} == before


def test_declarations_are_combined_over_the_children_that_serve() -> None:
    world = World()
    root, leaves = build(world)
    assert root.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.POST_REPLAY, "the state backend reads longest"
    assert root.needs_cpu_seq_lens
    for name in ("decode0", "decode1"):
        leaves[name].needs_cpu_seq_lens = False
    assert not root.needs_cpu_seq_lens, "the prefill side does not serve decode, so it does not count"
    assert root.unwrap(0, ForwardMode.DECODE) is leaves["decode0"]
    assert root.unwrap(2, ForwardMode.EXTEND) is leaves["prefill0"]
    assert root.unwrap(1, ForwardMode.DECODE).name == "linear"
    assert [leaf.name for leaf in root.leaves()].count("linear") == 2
