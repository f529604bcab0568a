"""Metadata preparation as a graph: after two warm-ups, a key at a time, other leaves' metadata untouched."""

from __future__ import annotations

import pytest
import torch

from attnplug.errors import ContractViolation
from attnplug.graphs.buffers import BatchBuffers
from attnplug.graphs.capture import EmulatedGraphs
from attnplug.graphs.full import GraphRunner
from attnplug.graphs.glue import GlueGraphs
from attnplug.graphs.options import GraphOptions
from attnplug.modes import ForwardMode
from attnplug.wrappers.hybrid import HybridAttnBackend

from .graph_world import MAX_CONTEXT, GraphWorld
from .table_backend import HostValueInGlue, TableBackend

CPU = torch.device("cpu")
DECODE = ForwardMode.DECODE


class Counting(TableBackend):
    prepared = 0
    seen_lens: object = ()

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.prepared += 1
        self.seen_lens = (batch.seq_lens_cpu, batch.max_seq_len)
        super().init_forward_metadata_out_graph(batch, in_capture)


def glue(world: GraphWorld, backend):
    buffers = BatchBuffers(4, 4, CPU)
    backend.init_cuda_graph_state(4, 4)
    graphs = GlueGraphs(backend, EmulatedGraphs(), max_context_len=MAX_CONTEXT)

    def prepare(lens, key="two"):
        return graphs.prepare(key, world.step(DECODE, lens, [1] * len(lens))[1].replay_view(buffers))

    return prepare


def test_preparation_is_replayed_after_two_warm_ups_and_shows_bounds_for_host_lengths() -> None:
    world = GraphWorld()
    backend = Counting(world.env)
    prepare = glue(world, backend)
    assert [prepare([3, 4]), prepare([4, 5]), prepare([5, 6])] == [False, False, True]
    assert backend.seen_lens == (None, MAX_CONTEXT)
    assert backend.prepared == 3, "two warm-ups and the capture"
    prepare([6, 7])
    assert backend.prepared == 4, "the first replay is compared with an eager run"
    prepare([9, 2])
    assert backend.prepared == 4
    lens = next(iter(backend.forward_metadata.values())).lens
    assert lens.tolist() == [9, 2]
    assert prepare([7], key="one") is False, "each key warms up"


def test_metadata_of_leaves_that_were_not_prepared_is_left_alone_and_a_failed_capture_restores() -> None:
    world = GraphWorld()
    prefill, decode = TableBackend(world.env), TableBackend(world.env)
    pair = HybridAttnBackend(prefill, decode)
    prepare = glue(world, pair)
    for lens in ([3, 4], [4, 5], [5, 6]):
        prepare(lens)
    world.prefill(pair, [3, 4])
    theirs = prefill.forward_metadata
    prepare([6, 7])
    assert prefill.forward_metadata is theirs
    broken = Synchronising(world.env)
    prepare = glue(world, broken)
    prepare([3, 4])
    prepare([4, 5])
    before = broken.forward_metadata
    with pytest.raises(ContractViolation, match=r"tolist\(\) in a captured region"):
        prepare([5, 6])
    assert broken.forward_metadata is before


class Synchronising(TableBackend):
    def fill(self, made, batch):
        super().fill(made, batch)
        batch.seq_lens.tolist()


def test_a_host_value_that_the_capture_froze_is_named_by_its_field() -> None:
    world = GraphWorld()
    prepare = glue(world, HostValueInGlue(world.env))
    for lens in ([3, 4], [4, 5], [5, 6]):
        prepare(lens)
    with pytest.raises(ContractViolation, match=r"captured preparation of two gives other metadata(.|\n)*\.lens"):
        prepare([6, 7])


def test_a_leaf_that_refuses_keeps_preparation_eager_with_its_reason() -> None:
    world = GraphWorld()
    backend = TableBackend(world.env)
    with pytest.raises(ContractViolation, match="only decode was looked at"):
        GlueGraphs(backend, EmulatedGraphs(), max_context_len=MAX_CONTEXT).prepare(
            "v", world.step(ForwardMode.TARGET_VERIFY, [5], [2])[1]
        )
    graphs = GraphRunner(
        world.model, backend, buckets=(1, 2), device=CPU, max_query_width=2, options=GraphOptions(glue=True)
    )
    assert graphs.glue_refusal(DECODE) == ""
    assert graphs.glue_refusal(ForwardMode.TARGET_VERIFY) == "only decode was looked at"
    out = graphs.run(*world.step(ForwardMode.TARGET_VERIFY, [2], [2]))
    torch.testing.assert_close(out, world.expected([2], [2]))
