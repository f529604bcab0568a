"""Every mode, over every way a request's slots can lie, against dense float64 attention."""

from __future__ import annotations

import pytest
import torch
from dense_world import World, assert_exact, layer

from attnplug.attention_io import AttentionExtras
from attnplug.modes import AttentionType, ForwardMode

LENS = (1, 5, 33, 257, 300, 64, 300)
SHAPES = {
    "decode": (ForwardMode.DECODE, LENS, (1,) * len(LENS)),
    "prefill": (ForwardMode.EXTEND, LENS, LENS),
    "chunk": (ForwardMode.EXTEND, LENS, (1, 3, 20, 100, 7, 64, 7)),
    "mixed": (ForwardMode.MIXED, LENS, (1, 1, 20, 1, 1, 64, 1)),
    "split": (ForwardMode.SPLIT_PREFILL, LENS, (1, 3, 20, 100, 7, 64, 7)),
    "draft": (ForwardMode.DRAFT_EXTEND, (4, 5, 33, 257, 300), (4,) * 5),
    "block": (ForwardMode.DLLM_EXTEND, (8, 40, 290), (8,) * 3),
}
LAYERS = {
    "gqa": {},
    "mha": {"num_kv_heads": 4},
    "mqa": {"num_kv_heads": 1},
    "window": {"sliding_window_size": 7},
    "wide_window": {"sliding_window_size": 280},
    "cap": {"logit_cap": 3.0},
    "narrow_v": {"v_head_dim": 8},
    "wide_v": {"v_head_dim": 24},
    "bidirectional": {"attn_type": AttentionType.DECODER_BIDIRECTIONAL},
    "bidirectional_window": {"attn_type": AttentionType.DECODER_BIDIRECTIONAL, "sliding_window_size": 6},
}
PLACES = {
    "scattered": {"page_size": 1},
    "runs": {"page_size": 1, "runs": True},
    "pages16": {"page_size": 16},
    "pages64": {"page_size": 64},
    "page_runs": {"page_size": 16, "runs": True},
    "heads_first": {"page_size": 16, "layout": "HND"},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_each_mode_gives_dense_attention(shape: str, kind: str) -> None:
    mode, lens, new = SHAPES[shape]
    world = World(layer(**LAYERS[kind]), lens, new, mode)
    assert_exact(world.run().out, world.expect()[0])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", ["decode", "chunk"])
@pytest.mark.parametrize("window", [-1, 20])
def test_where_slots_lie_does_not_matter(place: str, shape: str, window: int) -> None:
    mode, lens, new = SHAPES[shape]
    world = World(layer(sliding_window_size=window), lens, new, mode, **PLACES[place])
    assert_exact(world.run().out, world.expect()[0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_sinks_join_the_denominator_only(shape: str, cap: float) -> None:
    mode, lens, new = SHAPES[shape]
    sinks = torch.tensor([0.5, -1.0, 3.0, 40.0])
    world = World(layer(has_sinks=True, logit_cap=cap), lens, new, mode, sinks=sinks)
    assert_exact(world.run().out, world.expect()[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_lse_is_natural_and_without_sinks(shape: str) -> None:
    mode, lens, new = SHAPES[shape]
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    world = World(layer(has_sinks=True), lens, new, mode, sinks=sinks)
    out, lse, _ = world.run(extras=AttentionExtras(return_lse=True))
    want, want_lse = world.expect(sinks=False)
    assert lse is not None
    assert lse.dtype == torch.float32
    assert_exact(out, want)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("w", [0, 1, 31, 299, 300])
@pytest.mark.parametrize("shape", ["decode", "chunk"])
def test_window_has_w_plus_one_keys_at_its_edges(w: int, shape: str) -> None:
    mode = SHAPES[shape][0]
    lens = tuple(n for n in (w, w + 1, w + 2, w + 3) if n > 0)
    new = (1,) * len(lens) if shape == "decode" else lens
    world = World(layer(sliding_window_size=w), lens, new, mode)
    assert_exact(world.run().out, world.expect()[0])


def test_idle_gives_zeros_of_the_right_shape() -> None:
    world = World(layer(v_head_dim=8), (), (), ForwardMode.IDLE)
    out, lse, _ = world.run(extras=AttentionExtras(return_lse=True))
    assert out.shape == (0, 4, 8)
    assert lse is not None
    assert lse.shape == (0, 4)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_empty_batch_gives_no_rows(mode: ForwardMode) -> None:
    assert World(layer(), (), (), mode).run().out.shape == (0, 4, 16)


def test_requests_without_queries_are_passed_over() -> None:
    world = World(layer(), (5, 9, 0, 3), (5, 0, 0, 3))
    assert_exact(world.run().out, world.expect()[0])


def test_padding_rows_are_zeros_and_read_nothing() -> None:
    world = World(layer(), (5, 300, 1, 1), (1, 1, 1, 1), ForwardMode.DECODE, num_padding=2)
    out, lse, _ = world.run(extras=AttentionExtras(return_lse=True))
    want, want_lse = world.expect()
    assert_exact(out, want)
    assert lse is not None
    assert torch.isneginf(lse[2:]).all()
    assert torch.isneginf(want_lse[2:]).all()


@pytest.mark.parametrize("cut", [1 << 10, 1 << 13])
@pytest.mark.parametrize("kind", ["gqa", "window", "cap", "bidirectional_window"])
def test_cutting_long_queries_changes_nothing(cut: int, kind: str) -> None:
    from attnplug_torch_native.options import TorchNativeOptions

    options = TorchNativeOptions(max_score_cells=cut, max_gather_tokens=64)
    world = World(layer(**LAYERS[kind]), (300, 40, 40), (130, 40, 40), options=options)
    assert_exact(world.run().out, world.expect()[0])


def test_keys_beyond_one_block_are_merged() -> None:
    from attnplug_torch_native.kernels.softmax import KEY_BLOCK

    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    spec = layer(has_sinks=True, logit_cap=2.0)
    world = World(spec, (KEY_BLOCK + 40,), (1,), ForwardMode.DECODE, sinks=sinks)
    assert_exact(world.run().out, world.expect()[0])
