"""The batch's schema: what it counts, what it refuses, and its parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from attnplug.batch import ForwardBatch
from attnplug.errors import BatchError
from attnplug.modes import ForwardMode, KVSpace
from attnplug.spec_info import SpecInfo

from .batches import decode_batch, extend_batch


def verify_batch(lens: list[int], width: int) -> ForwardBatch:
    n = torch.tensor(lens)
    return decode_batch(
        lens,
        forward_mode=ForwardMode.TARGET_VERIFY,
        positions=(n[:, None] + torch.arange(width)).flatten(),
        out_cache_loc=torch.arange(1, len(lens) * width + 1),
        spec_info=SpecInfo(width),
    )


def test_kv_lens_include_the_draft_window_only_where_seq_lens_leave_it_out() -> None:
    assert decode_batch([3, 5]).kv_lens().tolist() == [3, 5]
    assert extend_batch([2, 0], [1, 5]).kv_lens().tolist() == [3, 5]
    assert verify_batch([3, 5], 4).kv_lens().tolist() == [7, 9]
    assert verify_batch([3, 5], 4).kv_lens_cpu() == (7, 9)
    idle = decode_batch([], forward_mode=ForwardMode.IDLE)
    assert idle.kv_lens().tolist() == []


def test_the_encoder_space_has_lengths_of_its_own_and_says_when_they_are_missing() -> None:
    batch = decode_batch([3, 5], encoder_lens=torch.tensor([7, 2]), encoder_lens_cpu=(7, 2))
    assert batch.kv_lens(KVSpace.ENCODER).tolist() == [7, 2]
    with pytest.raises(BatchError, match="encoder_lens is None"):
        decode_batch([3]).kv_lens(KVSpace.ENCODER)


def test_a_window_starts_at_the_first_key_that_the_first_query_sees() -> None:
    assert extend_batch([6, 0], [2, 3]).kv_start_idx(4).tolist() == [2, 0]
    assert decode_batch([9]).kv_start_idx(4).tolist() == [4]
    assert decode_batch([9]).kv_start_idx(-1).tolist() == [0]


def test_qo_indptr_counts_queries_in_every_mode() -> None:
    assert extend_batch([2, 0], [1, 5]).qo_indptr().tolist() == [0, 1, 6]
    assert decode_batch([3, 5]).qo_indptr().tolist() == [0, 1, 2]
    assert verify_batch([3, 5], 4).qo_indptr().tolist() == [0, 4, 8]


def test_a_batch_is_frozen_and_knows_its_fields() -> None:
    batch = decode_batch([3])
    with pytest.raises(ValidationError):
        batch.batch_size = 2  # type: ignore[misc]
    with pytest.raises(ValidationError, match="seq_len_cpu"):
        decode_batch([3], seq_len_cpu=None)


FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("rows", {"req_pool_indices": torch.zeros(3, dtype=torch.int64)}, "req_pool_indices is (3,)"),
    ("dtype", {"seq_lens": torch.tensor([3, 5], dtype=torch.int32)}, "seq_lens is (2,) torch.int32"),
    ("slots", {"out_cache_loc": torch.zeros(5, dtype=torch.int64)}, "out_cache_loc is (5,)"),
    ("padding", {"num_padding": 3}, "num_padding is 3; must be 0 … 2"),
    (
        "tokens",
        {"positions": torch.zeros(3, dtype=torch.int64), "out_cache_loc": torch.zeros(3).long()},
        "one a request",
    ),
    ("verify", {"forward_mode": ForwardMode.TARGET_VERIFY}, "spec_info is None"),
    ("extend", {"forward_mode": ForwardMode.EXTEND}, "extend_seq_lens is None"),
]


@pytest.mark.parametrize(("changes", "message"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_wrong_shape_is_an_error_that_names_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError) as caught:
        decode_batch([3, 5], **changes)
    assert message in str(caught.value)


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(BatchError) as caught:
        decode_batch([3], seq_lens=torch.zeros(2).long(), num_padding=9)
    assert len(caught.value.problems) >= 2


VALUE_FAULTS: list[tuple[str, ForwardBatch, str]] = [
    ("below", decode_batch([3, 5], seq_lens_cpu=torch.tensor([3, 4]), seq_lens_cpu_exact=False), "must be at least"),
    ("unequal", decode_batch([3, 5], seq_lens_cpu=torch.tensor([3, 6])), "must be equal to"),
    ("sum", decode_batch([3, 5], seq_lens_sum=9), "seq_lens_sum is 9; seq_lens give 8"),
    ("longest", decode_batch([3, 5], max_seq_len=4), "max_seq_len is 4; seq_lens give 5"),
    ("slot", decode_batch([3, 5], out_cache_loc=torch.tensor([1, 99])), "the pool has 0 … 63"),
    ("context", decode_batch([3, 500]), "the context is 100"),
    ("prefix", extend_batch([2], [3], extend_prefix_lens=torch.tensor([1], dtype=torch.int32)), "must be seq_lens"),
    ("start", extend_batch([2, 2], [3, 1], extend_start_loc=torch.tensor([0, 2], dtype=torch.int32)), "is [0, 3]"),
    ("host", extend_batch([2, 2], [3, 1], extend_seq_lens_cpu=(1, 3)), "extend_seq_lens_cpu is (1, 3)"),
]


@pytest.mark.parametrize(("batch", "message"), [f[1:] for f in VALUE_FAULTS], ids=[f[0] for f in VALUE_FAULTS])
def test_a_wrong_value_is_found_by_full_validation(batch: ForwardBatch, message: str) -> None:
    with pytest.raises(BatchError) as caught:
        batch.validate_values(num_slots=64, max_context_len=100)
    assert message in str(caught.value)


def test_right_values_pass_full_validation_and_an_upper_bound_may_exceed() -> None:
    decode_batch([3, 5]).validate_values(num_slots=64, max_context_len=100)
    extend_batch([2, 0], [1, 5]).validate_values(num_slots=64)
    loose = {"seq_lens_cpu": torch.tensor([4, 9]), "seq_lens_sum": 13, "max_seq_len": 9}
    decode_batch([3, 5], seq_lens_cpu_exact=False, **loose).validate_values()


def test_a_slice_is_a_batch_of_views() -> None:
    batch = extend_batch([2, 0, 4], [1, 5, 2])
    part = batch.slice(1, 3)
    part.validate_values()
    assert part.query_lens_cpu == (5, 2)
    assert part.extend_start_loc is not None
    assert part.extend_start_loc.tolist() == [0, 5]
    assert part.positions.tolist() == [0, 1, 2, 3, 4, 4, 5]
    assert part.positions.data_ptr() == batch.positions[1:].data_ptr()
    assert (part.seq_lens_sum, part.max_seq_len, part.extend_num_tokens) == (11, 6, 7)


def test_a_slice_out_of_range_is_refused() -> None:
    with pytest.raises(BatchError, match="slice 1 … 4 of a batch of 2"):
        decode_batch([3, 5]).slice(1, 4)


@pytest.mark.parametrize("mode", ["decode", "verify", "extend"])
def test_padding_is_legal_and_writes_the_sink(mode: str) -> None:
    batch = {"decode": decode_batch([3, 5]), "verify": verify_batch([3, 5], 4), "extend": extend_batch([2, 4], [2, 2])}[
        mode
    ]
    padded = batch.pad(4, seq_len_fill=1)
    padded.validate_values()
    assert (padded.batch_size, padded.num_padding) == (4, 2)
    assert padded.req_pool_indices[2:].tolist() == [0, 0]
    assert bool((padded.out_cache_loc[batch.num_tokens :] == 0).all())
    assert bool((padded.seq_lens[2:] >= 1).all())
    again = padded.slice(0, 2)
    assert again.num_padding == 0
    torch.testing.assert_close(again.positions, batch.positions)


def test_ragged_batches_cannot_be_padded() -> None:
    with pytest.raises(BatchError, match=r"query widths \[1, 5\]"):
        extend_batch([2, 0], [1, 5]).pad(4, seq_len_fill=1)


def test_padding_of_a_verify_step_without_requests_has_the_draft_width() -> None:
    from attnplug.spec_info import SpecInfo

    one = decode_batch([3]).replace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        spec_info=SpecInfo(2),
        positions=torch.tensor([3, 4]),
        out_cache_loc=torch.tensor([1, 2]),
    )
    padded = one.slice(0, 0).pad(3, seq_len_fill=1)
    assert (padded.batch_size, padded.num_padding, padded.num_tokens) == (3, 3, 6)


def test_padding_a_verify_batch_pads_every_part_of_its_drafts() -> None:
    info = SpecInfo(
        4,
        mask_row=1,
        mask_seq_lens=torch.tensor([9, 3, 5]),
        parents=torch.zeros(2, 4, dtype=torch.int64),
        accept_lens=torch.ones(2, dtype=torch.int32),
    )
    padded = verify_batch([3, 5], 4).replace(spec_info=info).pad(4, seq_len_fill=1).spec_info
    assert padded is not None
    assert padded.mask_seq_lens is not None
    assert padded.mask_seq_lens.tolist() == [9, 3, 5, 1, 1]
    assert padded.parents is not None
    assert padded.parents[2:].tolist() == [[-1, 0, 1, 2]] * 2
    assert padded.accept_lens is not None
    assert padded.accept_lens.tolist() == [1, 1, 0, 0]
