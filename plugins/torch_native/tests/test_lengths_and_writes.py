"""Host lengths that are upper bounds, rows that are not written, and what a backend may not touch."""

from __future__ import annotations

import pytest
import torch
from dense_world import World, assert_exact, layer

from attnplug.attention_io import AttentionExtras
from attnplug.modes import ForwardMode, SharedReadEnds

CASES = {
    "decode": (ForwardMode.DECODE, (1, 40, 257, 300), (1, 1, 1, 1)),
    "chunk": (ForwardMode.EXTEND, (1, 40, 257, 300), (1, 20, 1, 100)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", [-1, 0, 12])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_upper_bounds_are_masked_by_device_lengths(case: str, window: int, layout: str) -> None:
    mode, lens, new = CASES[case]
    spec = layer(sliding_window_size=window)
    world = World(spec, lens, new, mode, exact=False, page_size=16, layout=layout)
    assert_exact(world.run().out, world.expect()[0])


def test_request_whose_true_length_is_zero_gives_zeros() -> None:
    world = World(layer(), (0, 40), (0, 1), ForwardMode.EXTEND)
    batch = world.batch.replace(
        seq_lens_cpu=torch.tensor([3, 40]),
        seq_lens_cpu_exact=False,
        seq_lens_sum=43,
        forward_mode=ForwardMode.DECODE,
        positions=torch.tensor([0, 39]),
        out_cache_loc=torch.tensor([0, int(world.slots[1][39])]),
    )
    plan = world.translator.plan(req_pool_indices=batch.req_pool_indices, out_cache_loc=batch.out_cache_loc)
    world.batch = batch.replace(kv_loc_plan=plan)
    world.backend.init_forward_metadata(world.batch)
    q = torch.randn(2, 4, 16, dtype=torch.float64)
    k, v = world.k[1][-1:].repeat(2, 1, 1), world.v[1][-1:].repeat(2, 1, 1)
    out, lse, _ = world.backend.forward(q, k, v, world.module, world.batch, extras=AttentionExtras(return_lse=True))
    assert lse is not None
    assert (out[0] == 0).all()
    assert torch.isneginf(lse[0]).all()
    assert torch.isfinite(out[1]).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_rows_that_are_not_saved_are_still_attended(case: str, runs: bool, exact: bool, layout: str) -> None:
    mode, lens, new = CASES[case]
    world = World(layer(), lens, new, mode, runs=runs, exact=exact, page_size=16, layout=layout)
    before = [buffer.clone() for buffer in world.pool.get_kv_buffer(0)]
    assert_exact(world.run(save=False).out, world.expect()[0])
    for old, buffer in zip(before, world.pool.get_kv_buffer(0), strict=True):
        assert torch.equal(old.view(torch.int64), buffer.view(torch.int64))


def test_rows_that_are_in_the_pool_already_need_no_k_and_v() -> None:
    world = World(layer(), (5, 300), (5, 20))
    want = world.run().out
    got = world.backend.forward(world.q, None, None, world.module, world.batch).out
    assert torch.equal(got, want)


@pytest.mark.parametrize("case", CASES)
def test_nothing_of_the_callers_is_written(case: str) -> None:
    mode, lens, new = CASES[case]
    world = World(layer(sliding_window_size=9), lens, new, mode)
    k, v, q = world.new_rows(world.k), world.new_rows(world.v), world.q.clone()
    fields = {n: getattr(world.batch, n) for n in type(world.batch).model_fields}
    tensors = {n: (x, x.clone()) for n, x in fields.items() if isinstance(x, torch.Tensor)}
    copies = [x.clone() for x in (q, k, v)]
    world.backend.init_forward_metadata(world.batch)
    world.backend.forward(q, k, v, world.module, world.batch)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), copies, strict=True))
    assert all(torch.equal(now, old) for now, old in tensors.values())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("exact", [False, True])
def test_scheduler_may_overwrite_its_tensors_after_the_metadata(case: str, exact: bool) -> None:
    mode, lens, new = CASES[case]
    world = World(layer(sliding_window_size=100), lens, new, mode, exact=exact)
    world.backend.init_forward_metadata(world.batch)
    assert world.backend.shared_read_ends(mode) is SharedReadEnds.PRE_REPLAY
    world.env.req_to_token.fill_(2**30)
    world.batch.seq_lens.fill_(1)
    world.batch.req_pool_indices.fill_(0)
    out = world.backend.forward(
        world.q, world.new_rows(world.k), world.new_rows(world.v), world.module, world.batch
    ).out
    assert_exact(out, world.expect()[0])
