"""Target-verify: chains, and trees by both layouts of the mask, whole and in slices."""

from __future__ import annotations

import pytest
import torch
from dense_world import World, assert_exact, layer
from torch import Tensor

from attnplug.attention_io import AttentionExtras
from attnplug.masks.verify import TreeMaskMode, VerifyMask
from attnplug.modes import ForwardMode
from attnplug.spec_info import SpecInfo

W = 5
LENS = (W + 0, W + 1, W + 30, W + 400, W + 60)
PARENTS = (-1, 0, 0, 1, 2)


def tree_cells() -> Tensor:
    """Return [W, W]: a draft sees itself and its ancestors."""
    cells = torch.eye(W, dtype=torch.bool)
    for i, parent in enumerate(PARENTS):
        if parent >= 0:
            cells[i] |= cells[parent]
    return cells


def depths() -> Tensor:
    return torch.tensor([0, 1, 1, 2, 2])


def make_mask(mode: TreeMaskMode, lens: tuple[int, ...], *, hide: int = -1) -> VerifyMask:
    """Return a mask filled for cached lengths; ``hide`` hides one cached position, where the layout can."""
    mask = VerifyMask.allocate(
        mode, max_bs=len(lens) + 4, draft_token_num=W, max_context_len=500, device=torch.device("cpu")
    )
    parts = []
    for n in lens:
        cached = torch.ones(W, n, dtype=torch.bool)
        if 0 <= hide < n:
            cached[:, hide] = False
        parts.append(
            (tree_cells() if mode is TreeMaskMode.QLEN_ONLY else torch.cat([cached, tree_cells()], 1)).flatten()
        )
    cells = torch.cat(parts)
    mask.buffer[: len(cells)] = cells
    return mask


def tree_world(
    mode: TreeMaskMode, *, window: int = -1, hide: int = -1, max_context: int = 1 << 20, **kw: object
) -> tuple[World, list[Tensor]]:
    cached = tuple(n - W for n in LENS)
    info = SpecInfo(W, make_mask(mode, cached, hide=hide))
    spec = layer(sliding_window_size=window, **kw)
    world = World(spec, LENS, (W,) * len(LENS), ForwardMode.TARGET_VERIFY, spec_info=info, max_context=max_context)
    positions = torch.cat([n + depths() for n in cached])
    world.batch = world.batch.replace(positions=positions)
    visible = []
    for n in cached:
        seen = torch.cat([torch.ones(W, n, dtype=torch.bool), tree_cells()], 1)
        if mode is TreeMaskMode.FULL_MASK and 0 <= hide < n:
            seen[:, hide] = False
        at = torch.cat([torch.arange(n), n + depths()])
        if window >= 0:
            seen &= (n + depths())[:, None] - at[None] <= window
        visible.append(seen)
    return world, visible


@pytest.mark.parametrize("window", [-1, 3, 40])
def test_chain_is_causal(window: int) -> None:
    world = World(layer(sliding_window_size=window), LENS, (W,) * 5, ForwardMode.TARGET_VERIFY, spec_info=SpecInfo(W))
    assert_exact(world.run().out, world.expect()[0])


@pytest.mark.parametrize("mode", list(TreeMaskMode))
@pytest.mark.parametrize("window", [-1, 1, 40])
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_tree_sees_ancestors_only(mode: TreeMaskMode, window: int, cap: float) -> None:
    world, visible = tree_world(mode, window=window, logit_cap=cap)
    assert_exact(world.run().out, world.expect(visible)[0])


def test_full_mask_may_hide_cached_positions() -> None:
    world, visible = tree_world(TreeMaskMode.FULL_MASK, hide=0)
    out, lse, _ = world.run(extras=AttentionExtras(return_lse=True))
    want, want_lse = world.expect(visible)
    assert_exact(out, want)
    assert lse is not None
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_query_that_the_mask_leaves_nothing_gives_zeros() -> None:
    world, visible = tree_world(TreeMaskMode.FULL_MASK)
    mask = world.batch.spec_info.mask
    mask.buffer[: W * W] = False  # the first request has no cached positions
    visible[0][:] = False
    out, lse, _ = world.run(extras=AttentionExtras(return_lse=True))
    assert_exact(out, world.expect(visible)[0])
    assert lse is not None
    assert torch.isneginf(lse[:W]).all()


@pytest.mark.parametrize("mode", list(TreeMaskMode))
@pytest.mark.parametrize("cut", [1, 3, 4])
def test_slices_of_a_batch_read_their_rows_of_the_mask(mode: TreeMaskMode, cut: int) -> None:
    world, visible = tree_world(mode)
    whole = world.expect(visible)[0]
    outs = []
    for start, stop in ((0, cut), (cut, len(LENS))):
        part = world.batch.slice(start, stop)
        rows = slice(start * W, stop * W)
        world.backend.init_forward_metadata(part)
        k, v = world.new_rows(world.k)[rows], world.new_rows(world.v)[rows]
        outs.append(world.backend.forward(world.q[rows], k, v, world.module, part).out)
    assert_exact(torch.cat(outs), whole)


@pytest.mark.parametrize("mode", list(TreeMaskMode))
def test_mask_filled_after_metadata_is_read_by_the_update(mode: TreeMaskMode) -> None:
    world, visible = tree_world(mode)
    mask = world.batch.spec_info.mask
    filled = mask.buffer.clone()
    mask.buffer.fill_(True)
    world.backend.init_forward_metadata(world.batch)
    mask.buffer.copy_(filled)
    world.backend.update_verify_buffers_to_fill_after_draft(world.batch.spec_info, len(LENS))
    k, v = world.new_rows(world.k), world.new_rows(world.v)
    out = world.backend.forward(world.q, k, v, world.module, world.batch).out
    assert_exact(out, world.expect(visible)[0])


@pytest.mark.parametrize("mode", list(TreeMaskMode))
def test_upper_bounds_of_lengths_give_the_same_tree(mode: TreeMaskMode) -> None:
    world, visible = tree_world(mode, window=40)
    host = world.batch.seq_lens_cpu + 7
    world.batch = world.batch.replace(
        seq_lens_cpu=host, seq_lens_cpu_exact=False, seq_lens_sum=int(host.sum()), max_seq_len=int(host.max())
    )
    assert_exact(world.run().out, world.expect(visible)[0])
