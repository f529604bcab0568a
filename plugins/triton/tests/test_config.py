from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the kernel library is not installed")

from attnplug_triton.kernels.args import Widths
from attnplug_triton.kernels.config import decode_schedule, decode_tile, extend_tile

H200 = 132


def schedule(batch, heads, tokens, *, ragged=False, deterministic=False, max_splits=256):
    return decode_schedule(
        batch_size=batch, heads=heads, max_tiles=-(-tokens // 64), sms=H200, max_splits=max_splits,
        deterministic=deterministic, ragged=ragged, keys=64,
    )  # fmt: skip


@pytest.mark.parametrize(("batch", "heads", "splits"), [(1, 8, 33), (8, 8, 4), (8, 4, 8), (1, 4, 66)])
def test_a_small_batch_fills_the_card(batch, heads, splits):
    one = schedule(batch, heads, 32768)
    assert (one.kind, one.splits, one.partials) == ("equal", splits, batch * splits)


@pytest.mark.parametrize("batch", [64, 256, 1024])
def test_a_full_card_is_not_split(batch):
    assert schedule(batch, 8, 8192).kind == "single"


def test_a_ragged_batch_streams_and_a_single_request_does_not():
    assert schedule(64, 8, 32768, ragged=True).kind == "stream"
    assert schedule(1, 8, 32768, ragged=True).kind == "equal"


def test_shares_keep_two_tiles_and_the_bound():
    assert schedule(1, 8, 256).splits == 2
    assert schedule(1, 1, 1 << 17, max_splits=16).splits == 16


def test_fixed_shares_follow_from_a_request_alone():
    few, many = schedule(2, 8, 8192, deterministic=True), schedule(200, 8, 8192, deterministic=True, ragged=True)
    assert few.splits == many.splits
    assert few.kind == many.kind == "fixed"


@pytest.mark.parametrize("programs", [8, 512, 2048])
def test_the_tile_itself_never_depends_on_the_batch(programs):
    one, other = (decode_tile(Widths(128, 128), 4, 2, n, H200) for n in (1, programs))
    assert (one.rows, one.keys, one.warps) == (other.rows, other.keys, other.warps)


def test_stages_follow_the_waves():
    assert decode_tile(Widths(128, 128), 4, 2, 512, H200).stages == 2
    assert decode_tile(Widths(128, 128), 4, 2, 264, H200).stages == 3
    assert decode_tile(Widths(128, 128), 4, 2, 2048, H200).stages == 3
    assert decode_tile(Widths(64, 64), 8, 2, 512, H200).stages == 3


def test_a_batch_with_many_short_requests_takes_smaller_tiles():
    assert extend_tile(Widths(128, 128), 8192, 2).rows == 128
    assert extend_tile(Widths(128, 128), 8192, 2, short=True).rows == 64


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("width", [16, 80, 128, 192, 256])
@pytest.mark.parametrize("rows", [1, 40, 4096])
def test_shared_memory_stays_within_a_multiprocessor(itemsize, width, rows):
    padded = max(16, 1 << (width - 1).bit_length())
    for tile in (
        decode_tile(Widths(width, width), rows, itemsize, 1, H200),
        extend_tile(Widths(width, width), rows, itemsize),
    ):
        held = itemsize * padded * (tile.rows + 2 * tile.keys * max(tile.stages - 1, 1))
        assert held <= 227 * 1024
