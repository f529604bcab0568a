"""Pools and the translator: what is written where, and what a reader is given."""

from __future__ import annotations

import pytest
import torch

from attnplug.errors import BatchError, ConfigError, ContractViolation
from attnplug.kv.pools import MHAKVPool, MLAKVPool, SpacedKVPool, pool_slots
from attnplug.kv.quant import dequantize, quantize
from attnplug.kv.translator import KVIndexTranslator
from attnplug.kv.write_loc import KVWriteLoc
from attnplug.layer import AttentionLayer
from attnplug.model_spec import LayerSpec
from attnplug.modes import KVSpace
from attnplug.spec import Kind

from .batches import decode_batch

SOFTMAX = LayerSpec(layer_id=0, num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=6)
CROSS = LayerSpec(layer_id=1, num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=8, is_cross_attention=True)
LATENT = LayerSpec(
    layer_id=2,
    kind=Kind.MLA,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    v_head_dim=8,
    kv_lora_rank=16,
    qk_rope_head_dim=4,
)


def pool_of(*, page_size: int = 4, dtype: torch.dtype = torch.float32, layout: str = "NHD") -> MHAKVPool:
    return MHAKVPool([SOFTMAX], num_pages=6, page_size=page_size, dtype=dtype, device="cpu", layout=layout)


def token(pool: MHAKVPool, slot: int) -> torch.Tensor:
    keys, _ = pool.get_kv_buffer(0)
    return keys[slot] if pool.layout == "NHD" else keys[slot // pool.page_size, :, slot % pool.page_size]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_are_stored_at_their_slots_and_nowhere_else(layout: str, page_size: int, dtype: torch.dtype) -> None:
    pool, layer = pool_of(page_size=page_size, dtype=dtype, layout=layout), AttentionLayer.from_spec(SOFTMAX)
    k, v = torch.randn(2, 2, 8, dtype=dtype), torch.randn(2, 2, 6, dtype=dtype)
    slots = torch.tensor([pool.num_slots - 1, page_size])
    pool.set_kv_buffer(layer, KVWriteLoc(slots, KVSpace.FULL), k, v)
    torch.testing.assert_close(token(pool, int(slots[0])), k[0])
    torch.testing.assert_close(token(pool, int(slots[1])), k[1])
    keys, values = pool.get_kv_buffer(0)
    assert int((keys != 0).sum()) == k.numel()
    assert int((values != 0).sum()) == v.numel()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_fp8_holds_x_over_scale_and_the_caller_keeps_its_tensor(dtype: torch.dtype, layout: str) -> None:
    pool, layer = pool_of(dtype=dtype, layout=layout), AttentionLayer.from_spec(SOFTMAX, k_scale=0.5, v_scale=2.0)
    k, v = torch.randn(1, 2, 8), torch.randn(1, 2, 6)
    kept = k.clone()
    pool.set_kv_buffer(layer, KVWriteLoc(torch.tensor([5]), KVSpace.FULL), k, v)
    stored = dequantize(token(pool, 5), 0.5, torch.float32)
    torch.testing.assert_close(stored, k[0], rtol=0.13 if dtype is torch.float8_e4m3fn else 0.26, atol=1e-2)
    torch.testing.assert_close(k, kept)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_saturates_instead_of_overflowing(dtype: torch.dtype) -> None:
    stored = quantize(torch.tensor([1e9, -1e9]), 1.0, dtype).float()
    assert stored.tolist() == [torch.finfo(dtype).max, -torch.finfo(dtype).max]


def test_a_pool_refuses_slots_of_another_space_and_of_another_count() -> None:
    pool, layer = pool_of(), AttentionLayer.from_spec(SOFTMAX)
    before = pool.get_kv_buffer(0)[0].clone()
    with pytest.raises(BatchError) as caught:
        pool.set_kv_buffer(
            layer, KVWriteLoc(torch.tensor([1, 2]), KVSpace.WINDOW), torch.ones(1, 2, 8), torch.ones(1, 2, 6)
        )
    assert "slots of the window space, its pool has full slots" in str(caught.value)
    assert "2 slots for 1 rows" in str(caught.value)
    assert torch.equal(pool.get_kv_buffer(0)[0], before)


@pytest.mark.parametrize(("page_size", "num_pages"), [(3, 4), (0, 4), (16, 0)])
def test_an_impossible_pool_is_refused(page_size: int, num_pages: int) -> None:
    with pytest.raises(ConfigError):
        MHAKVPool([SOFTMAX], num_pages=num_pages, page_size=page_size, dtype=torch.float32, device="cpu")


def test_latent_rows_hold_latent_and_rope_side_by_side() -> None:
    pool = MLAKVPool([LATENT], num_pages=2, page_size=4, dtype=torch.float32, device="cpu")
    latent, rope = torch.randn(1, 16), torch.randn(1, 4)
    pool.set_kv_buffer(AttentionLayer.from_spec(LATENT), KVWriteLoc(torch.tensor([6]), KVSpace.FULL), latent, rope)
    rows, latents = pool.get_kv_buffer(2)
    torch.testing.assert_close(rows[6, 0], torch.cat([latent, rope], 1)[0])
    torch.testing.assert_close(latents[6, 0], latent[0])
    assert latents.data_ptr() == rows.data_ptr()


def test_a_spaced_pool_routes_each_layer_to_its_own_part() -> None:
    encoder = MHAKVPool([CROSS], num_pages=2, page_size=4, dtype=torch.float32, device="cpu", space=KVSpace.ENCODER)
    pool = SpacedKVPool([pool_of(), encoder])
    assert pool.layer_spaces == {0: KVSpace.FULL, 1: KVSpace.ENCODER}
    loc = KVWriteLoc(torch.tensor([4]), KVSpace.FULL)
    with pytest.raises(BatchError, match="full space, its pool has encoder"):
        pool.set_kv_buffer(AttentionLayer.from_spec(CROSS), loc, torch.ones(1, 2, 8), torch.ones(1, 2, 8))
    with pytest.raises(ConfigError, match="layer 0 is in two pools"):
        SpacedKVPool([pool_of(), pool_of()])


def table_of(page_size: int) -> torch.Tensor:
    """Three requests over scattered pages; row 0 is the padding row."""
    table = torch.zeros(4, 12, dtype=torch.int32)
    pages = torch.tensor([[5, 2, 6], [1, 4, 3], [0, 0, 0]])
    for row in range(3):
        for at in range(12):
            table[row + 1, at] = pages[row, (at // 4)] * 4 + at % 4 if row < 2 else 0
    return table


def translator_of(page_size: int = 4) -> KVIndexTranslator:
    return KVIndexTranslator(pool_of(page_size=page_size), table_of(page_size))


def stream(lens: list[int], starts: list[int] | None, entry: int, capacity: int = 20) -> tuple[list[int], list[int]]:
    translator, n = translator_of(), torch.tensor(lens)
    rows = torch.arange(1, len(lens) + 1)
    plan = translator.plan(req_pool_indices=rows, out_cache_loc=torch.zeros(len(lens), dtype=torch.int64))
    indptr = torch.full((len(lens) + 1,), -7, dtype=torch.int32)
    out = torch.full((capacity,), -7, dtype=torch.int32)
    begin = None if starts is None else torch.tensor(starts)
    translator.pack_read_stream(
        plan, seq_lens=n, indptr=indptr, out=out, kv_start_idx=begin, kind=KVSpace.FULL, entry_page_size=entry
    )
    return indptr.tolist(), out.tolist()


def test_a_stream_lists_each_requests_slots_in_order() -> None:
    indptr, ids = stream([6, 0, 0], None, 1)
    assert indptr == [0, 6, 6, 6]
    assert ids[:6] == [20, 21, 22, 23, 8, 9]
    assert ids[6:] == [0] * 14, "what is beyond the stream is the sink"
    indptr, ids = stream([2, 5], None, 1)
    assert (indptr, ids[:7]) == ([0, 2, 7], [20, 21, 4, 5, 6, 7, 16])


def test_a_stream_starts_where_the_window_does() -> None:
    assert stream([3, 2], [3, 0], 1)[1][:5] == [23, 8, 9, 4, 5]


def test_a_stream_of_pages_starts_at_a_pages_start() -> None:
    indptr, ids = stream([3, 9], [3, 0], 4)
    assert indptr == [0, 2, 5], "positions 3 … 5 lie in two pages, 0 … 8 in three"
    assert ids[:5] == [5, 2, 1, 4, 3]


def test_an_empty_stream_needs_no_room() -> None:
    assert stream([0, 0], None, 1, capacity=0) == ([0, 0, 0], [])


def test_a_page_table_and_last_page_lengths() -> None:
    translator = translator_of()
    plan = translator.plan(req_pool_indices=torch.tensor([2, 1]), out_cache_loc=torch.zeros(2, dtype=torch.int64))
    out, last = torch.full((2, 4), -1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    translator.copy_page_table(plan, out=out, kind=KVSpace.FULL)
    assert out[:, :3].tolist() == [[1, 4, 3], [5, 2, 6]]
    assert bool(((out >= 0) & (out < 7)).all()), "columns past the table are still legal pages"
    translator.last_page_lens(torch.tensor([0, 4, 6]), out=last)
    assert last.tolist() == [0, 4, 2]


def test_a_page_table_clamps_what_the_scheduler_left_behind() -> None:
    table = table_of(4)
    table[1, 8:] = 2**30
    dirty = KVIndexTranslator(pool_of(), table)
    plan = dirty.plan(req_pool_indices=torch.tensor([1]), out_cache_loc=torch.zeros(1, dtype=torch.int64))
    out = torch.zeros(1, 3, dtype=torch.int32)
    dirty.copy_page_table(plan, out=out, kind=KVSpace.FULL)
    assert out[0].tolist() == [5, 2, 6]


def test_the_row_reader_copies_nothing() -> None:
    table = table_of(4)
    translator = KVIndexTranslator(pool_of(), table)
    rows = torch.tensor([2])
    plan = translator.plan(req_pool_indices=rows, out_cache_loc=torch.zeros(1, dtype=torch.int64))
    source = translator.read_source(plan, KVSpace.FULL)
    assert source.ids.data_ptr() == table.data_ptr()
    assert source.row_ids.data_ptr() == rows.data_ptr()
    assert (source.entry_page_size, source.row_stride) == (1, 12)


def test_a_plan_of_another_translator_and_an_unserved_space_are_refused() -> None:
    mine, other = translator_of(), translator_of()
    plan = other.plan(req_pool_indices=torch.tensor([1]), out_cache_loc=torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ContractViolation, match="made by another translator"):
        mine.read_source(plan, KVSpace.FULL)
    with pytest.raises(ContractViolation, match="the encoder space is not served; served: full"):
        other.read_source(plan, KVSpace.ENCODER)


def test_writes_go_to_the_layers_own_space() -> None:
    translator = KVIndexTranslator(pool_of(), table_of(4), encoder_req_to_token=table_of(4))
    plan = translator.plan(
        req_pool_indices=torch.tensor([1]),
        out_cache_loc=torch.tensor([9]),
        encoder_out_cache_loc=torch.tensor([17, 18]),
    )
    batch = decode_batch([3], kv_loc_plan=plan, out_cache_loc=torch.tensor([9]))
    own, cross = AttentionLayer.from_spec(SOFTMAX), AttentionLayer.from_spec(CROSS)
    assert KVWriteLoc.for_layer(batch, own).slots.tolist() == [9]
    assert KVWriteLoc.for_layer(batch, cross).slots.tolist() == [17, 18]
    assert KVWriteLoc.for_layer(batch, cross).space is KVSpace.ENCODER


def test_a_layer_without_slots_in_the_plan_is_refused() -> None:
    plan = translator_of().plan(req_pool_indices=torch.tensor([1]), out_cache_loc=torch.tensor([9]))
    with pytest.raises(ContractViolation, match="writes to the encoder space, but the plan has slots only for full"):
        KVWriteLoc.for_layer(decode_batch([3], kv_loc_plan=plan), AttentionLayer.from_spec(CROSS))
    with pytest.raises(ContractViolation, match="no kv_loc_plan"):
        KVWriteLoc.for_layer(decode_batch([3]), AttentionLayer.from_spec(SOFTMAX))


def test_a_table_of_another_dtype_is_refused() -> None:
    with pytest.raises(BatchError, match="must be \\[R, S\\] int32"):
        KVIndexTranslator(pool_of(), table_of(4).long())


@pytest.mark.parametrize(
    ("lens", "capacity", "indptr"),
    [([], 0, [0]), ([], 3, [0]), ([3, 4], 0, [0, 0, 0]), ([3, 4], 5, [0, 3, 5]), ([3, 4], 9, [0, 3, 7])],
)
def test_a_stream_never_points_past_its_buffer(lens, capacity, indptr):
    pool = MHAKVPool([], num_pages=8, page_size=4, dtype=torch.float32, device="cpu")
    table = torch.arange(1, 25, dtype=torch.int32).reshape(2, 12)
    translator = KVIndexTranslator(pool, table)
    rows = torch.arange(len(lens))
    plan = translator.plan(req_pool_indices=rows, out_cache_loc=rows)
    ends, out = torch.full((len(lens) + 1,), -7, dtype=torch.int32), torch.full((capacity,), -7, dtype=torch.int32)
    seq_lens = torch.tensor(lens, dtype=torch.int64)
    translator.pack_read_stream(plan, seq_lens=seq_lens, indptr=ends, out=out, kind=KVSpace.FULL)
    assert ends.tolist() == indptr
    slots = [slot for row, length in enumerate(lens) for slot in table[row, :length].tolist()]
    assert out.tolist() == (slots + [0] * capacity)[:capacity]


@pytest.mark.parametrize(
    ("num_pages", "page_size", "said"),
    [
        (4, 3, "page_size is 3; allowed: 1, 2, 4"),
        (0, 16, "num_pages is 0; allowed: at least 1"),
        (2**27, 16, "num_pages is 134217728; allowed: at most 134217727 of 16 tokens"),
    ],
)
def test_a_pool_that_cannot_be_says_what_could(num_pages, page_size, said):
    with pytest.raises(ConfigError, match=said):
        pool_slots(num_pages, page_size)


def test_slots_reach_to_the_end_of_int32():
    assert pool_slots(2**27 - 1, 16) == 2**31
