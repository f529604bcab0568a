"""Steps from graphs equal dense attention: other lengths, smaller and larger batches, padding, trees."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from dense_world import World, assert_exact, layer
from test_verify import LENS as TREE_LENS
from test_verify import TreeMaskMode, W, tree_world
from torch import Tensor

from attnplug.batch import ForwardBatch
from attnplug.errors import BackendRejected
from attnplug.graphs.full import GraphRunner
from attnplug.graphs.options import EVERY_REPLAY, GraphOptions
from attnplug.modes import ForwardMode, GraphLevel, KVSpace
from attnplug.spec_info import SpecInfo
from attnplug_torch_native.options import TorchNativeOptions

LENS = (1, 33, 257, 300, 64)
KINDS = {
    "plain": {},
    "window": {"sliding_window_size": 40},
    "cap_and_narrow_v": {"logit_cap": 3.0, "v_head_dim": 8},
    "cross": {"is_cross_attention": True},
}


def runner(world: World, width: int, **options: object) -> GraphRunner:
    def model(inputs: Mapping[str, Tensor], batch: ForwardBatch) -> Tensor:
        new = (None, None) if world.layer.is_cross_attention else (inputs["k"], inputs["v"])
        return world.backend.forward(inputs["q"], *new, world.module, batch, new[0] is not None).out

    return GraphRunner(
        model,
        world.backend,
        buckets=(1, 2, 4, 8),
        device=torch.device("cpu"),
        max_query_width=width,
        options=GraphOptions(pointer_checks=EVERY_REPLAY, **options),
    )


def replay(world: World, graphs: GraphRunner, start: int, stop: int, width: int) -> Tensor:
    rows = slice(start * width, stop * width)
    inputs = {"q": world.q[rows]}
    if not world.layer.is_cross_attention:
        inputs |= {"k": world.new_rows(world.k)[rows], "v": world.new_rows(world.v)[rows]}
    return graphs.run(inputs, world.batch.slice(start, stop))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("glue", [False, True], ids=["eager_prep", "glue"])
@pytest.mark.parametrize("most", [64, 8192], ids=["tile_a_request", "one_tile"])
def test_decode_replays_equal_dense_attention_in_any_order_of_sizes(kind: str, glue: bool, most: int) -> None:
    encoder = (40, 300, 7, 0, 1) if kind == "cross" else None
    world = World(
        layer(**KINDS[kind]),
        LENS,
        (1,) * 5,
        ForwardMode.DECODE,
        encoder_lens=encoder,
        max_context=320,
        options=TorchNativeOptions(max_gather_tokens=most),
        poison=0.0 if kind == "cross" else float("nan"),
    )
    want = world.expect()[0]
    graphs = runner(world, 1, glue=glue)
    for start, stop in ((0, 5), (2, 3), (1, 4), (0, 5), (3, 5)):
        assert_exact(replay(world, graphs, start, stop, 1), want[start:stop])


def test_sinks_join_in_a_graph() -> None:
    world = World(
        layer(has_sinks=True),
        LENS,
        (1,) * 5,
        ForwardMode.DECODE,
        sinks=torch.tensor([0.5, -1.0, 3.0, 0.0]),
        max_context=320,
    )
    assert_exact(replay(world, runner(world, 1), 0, 5, 1), world.expect()[0])


@pytest.mark.parametrize("window", [-1, 40])
def test_chain_verify_replays_equal_dense_attention(window: int) -> None:
    lens = (W, W + 1, W + 30, W + 400, W + 60)
    spec = layer(sliding_window_size=window)
    info = SpecInfo(W)
    world = World(spec, lens, (W,) * 5, ForwardMode.TARGET_VERIFY, spec_info=info, max_context=500)
    want, graphs = world.expect()[0], runner(world, W)
    for start, stop in ((0, 5), (3, 4), (1, 5)):
        assert_exact(replay(world, graphs, start, stop, W), want[start * W : stop * W])


@pytest.mark.parametrize("mode", list(TreeMaskMode))
@pytest.mark.parametrize("window", [-1, 3])
def test_tree_verify_replays_read_the_mask_of_the_moment(mode: TreeMaskMode, window: int) -> None:
    world, visible = tree_world(mode, window=window, max_context=500)
    want, graphs, count = world.expect(visible)[0], runner(world, W), len(TREE_LENS)
    assert_exact(replay(world, graphs, 0, count, W), want)
    mask = world.batch.spec_info.mask
    filled = mask.buffer.clone()
    mask.buffer.fill_(True)
    replay(world, graphs, 0, count, W)
    mask.buffer.copy_(filled)
    assert_exact(replay(world, graphs, 0, count, W), want)
    assert_exact(replay(world, graphs, 0, 2, W), want[: 2 * W])
    assert "from row 1 of its mask" in graphs.can_run(world.batch.slice(1, 3))[0]


def test_encoder_longer_than_the_graphs_columns_is_refused() -> None:
    spec = layer(is_cross_attention=True)
    world = World(spec, (1,), (1,), ForwardMode.DECODE, encoder_lens=(400,), max_context=320, poison=0.0)
    with pytest.raises(BackendRejected, match="encoder_lens"):
        replay(world, runner(world, 1), 0, 1, 1)
    assert KVSpace.ENCODER in world.translator.spaces


@pytest.mark.parametrize(
    ("window", "bound", "level"),
    [
        (-1, 8192, GraphLevel.UNIFORM),
        (-1, 16, GraphLevel.NONE),
        (10, 16, GraphLevel.UNIFORM),
        (16, 16, GraphLevel.NONE),
    ],
    ids=["short", "long", "window", "wide_window"],
)
def test_a_context_whose_captured_reads_cost_more_than_eager_ones_serves_no_graphs(
    window: int, bound: int, level: GraphLevel
) -> None:
    options = TorchNativeOptions(max_graph_context_len=bound)
    world = World(
        layer(sliding_window_size=window), LENS, (1,) * 5, ForwardMode.DECODE, max_context=320, options=options
    )
    assert world.backend.graph_level is level
