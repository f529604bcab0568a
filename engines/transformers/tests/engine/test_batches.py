"""Batches as the builder makes them, against what the contract says of each field."""

from __future__ import annotations

import torch

from attnplug.kv.translator import KVIndexTranslator
from attnplug.modes import ForwardMode, KVSpace
from attnplug_transformers.batch_builder import BatchBuilder
from attnplug_transformers.pages import RequestTable
from attnplug_transformers.request import EngineRequest
from attnplug_transformers.sampling import SamplingParams
from attnplug_transformers.scheduler import ScheduledRows, StepPlan


class Pool:
    page_size, num_slots, sink_slot = 4, 100, 0


def rows_of(table, *parts):
    rows = []
    for at, (length, start, count) in enumerate(parts):
        request = EngineRequest(
            request_id=at,
            prompt=tuple(range(10 * at, 10 * at + length)),
            max_new_tokens=5,
            params=SamplingParams(),
            end_ids=frozenset(),
            max_len=100,
        )
        request.row = table.take_row()
        pages = [7 + 3 * at, 5 + 3 * at]
        table.assign(request.row, 0, pages)
        rows.append(ScheduledRows(request, start, count))
    return rows


def build(mode, *parts):
    table = RequestTable(4, 16, 4, torch.device("cpu"))
    builder = BatchBuilder(table, KVIndexTranslator(Pool(), table.device_table), torch.device("cpu"))
    inputs = builder.build(StepPlan(mode, rows_of(table, *parts)))
    inputs.batch.validate_values(num_slots=100, max_context_len=16)
    return table, inputs


def test_a_mixed_batch():
    table, (batch, input_ids, logits_rows, _) = build(ForwardMode.MIXED, (6, 5, 1), (8, 2, 3))
    assert input_ids.tolist() == [5, 12, 13, 14]
    assert batch.positions.tolist() == [5, 2, 3, 4]
    assert batch.out_cache_loc.tolist() == [5 * 4 + 1, 10 * 4 + 2, 10 * 4 + 3, 8 * 4]
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [6, 5]
    assert batch.extend_seq_lens.tolist() == list(batch.extend_seq_lens_cpu) == [1, 3]
    assert batch.extend_prefix_lens.tolist() == list(batch.extend_prefix_lens_cpu) == [5, 2]
    assert batch.extend_start_loc.tolist() == [0, 1]
    assert logits_rows.tolist() == [0], "a prompt's middle chunk asks for no logits"
    plan = batch.kv_loc_plan
    assert plan.write_slots[KVSpace.FULL].tolist() == batch.out_cache_loc.tolist()
    assert table.host[batch.req_pool_indices.tolist(), 0].tolist() == [28, 40]


def test_a_decode_batch():
    _, (batch, input_ids, logits_rows, _) = build(ForwardMode.DECODE, (6, 5, 1), (3, 2, 1))
    assert batch.forward_mode is ForwardMode.DECODE
    assert input_ids.tolist() == [5, 12]
    assert batch.positions.tolist() == [5, 2]
    assert batch.out_cache_loc.tolist() == [21, 42]
    assert (batch.seq_lens_sum, batch.max_seq_len) == (9, 6)
    assert batch.extend_seq_lens is None
    assert logits_rows.tolist() == [0, 1]


def test_row_zero_and_the_first_page_stay_the_padding_rows():
    table, _ = build(ForwardMode.DECODE, (6, 5, 1))
    assert not table.host[0].any()


def test_a_table_on_another_device_gets_its_rows_by_copy():
    table = RequestTable(2, 8, 4, torch.device("cpu"))
    table.device_table, table._shared = table.device_table.clone(), False
    row = table.take_row()
    table.assign(row, 0, [3])
    table.assign(row, 1, [2])
    assert table.device_table[row].tolist() == table.host[row].tolist() == [12, 13, 14, 15, 8, 9, 10, 11]
