"""One builder for both: fresh tensors eagerly, slices of fixed ones under a graph; and their refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from attnplug.batch import ForwardBatch, LinearState
from attnplug.errors import BatchError, ConfigError, ContractViolation
from attnplug.graphs.buckets import batch_buckets, bucket_for, token_buckets
from attnplug.graphs.buffers import BatchBuffers
from attnplug.graphs.metadata_buffers import BufferSpec, FixedBuffers, FreshBuffers, GraphBufferSets
from attnplug.graphs.pointers import metadata_tensors
from attnplug.modes import ForwardMode, KVSpace
from attnplug.spec_info import SpecInfo

from .graph_world import GraphWorld
from .table_backend import TableBackend

CPU = torch.device("cpu")
SPECS = {"indptr": BufferSpec((5,), torch.int32), "table": BufferSpec((4, 6), torch.int32, 7)}


def test_fixed_buffers_are_initialised_and_slices_share_addresses_and_rows() -> None:
    fixed = FixedBuffers(SPECS, CPU)
    assert fixed.take("table", (4, 6), torch.int32).eq(7).all()
    whole, part = fixed.take("table", (4, 6), torch.int32), fixed.take("table", (2, 3), torch.int32)
    assert part.data_ptr() == whole.data_ptr()
    assert part[1].data_ptr() == whole[1].data_ptr()
    assert fixed.nbytes() == 4 * (5 + 24)


def test_fresh_buffers_share_nothing() -> None:
    fresh = FreshBuffers(CPU)
    first, second = (fresh.take("table", (2, 3), torch.int32) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    assert first.shape == (2, 3)


def test_out_of_room_names_buffer_asked_and_capacity() -> None:
    fixed = FixedBuffers(SPECS, CPU, owner="acme group 1")
    with pytest.raises(
        ContractViolation, match=r"'table' of acme group 1 has no room: asked \(5, 6\), capacity \(4, 6\)"
    ):
        fixed.take("table", (5, 6), torch.int32)
    with pytest.raises(ContractViolation, match=r"asked \(24,\), capacity \(4, 6\)"):
        fixed.take("table", (24,), torch.int32)


@pytest.mark.parametrize("kind", ["fixed", "fresh"])
def test_a_name_has_one_dtype(kind: str) -> None:
    buffers = FixedBuffers(SPECS, CPU) if kind == "fixed" else FreshBuffers(CPU)
    buffers.take("indptr", (3,), torch.int32)
    with pytest.raises(ContractViolation, match=r"'indptr' was asked as torch.int64, and is torch.int32"):
        buffers.take("indptr", (3,), torch.int64)


def test_a_name_that_was_not_reserved_is_refused_with_those_that_were() -> None:
    with pytest.raises(ContractViolation, match=r"'lens' was never reserved; reserved: indptr, table"):
        FixedBuffers(SPECS, CPU).take("lens", (1,), torch.int32)


def test_groups_have_sets_of_their_own_and_the_batch_decides_which_kind() -> None:
    world = GraphWorld()
    _, batch = world.step(ForwardMode.DECODE, [3], [1])
    sets = GraphBufferSets(CPU)
    view = batch.replay_view(BatchBuffers(2, 2, CPU))
    with pytest.raises(ContractViolation, match="no graph buffers are reserved for a"):
        sets.of(view, "a")
    sets.reserve(("a", "b"), SPECS)
    taken = {group: sets.of(view, group).take("indptr", (2,), torch.int32).data_ptr() for group in "ab"}
    assert taken["a"] != taken["b"]
    assert sets.of(view, "a").take("indptr", (1,), torch.int32).data_ptr() == taken["a"]
    assert isinstance(sets.of(batch, "a"), FreshBuffers)
    with pytest.raises(ContractViolation, match="reserved a second time"):
        sets.reserve(("b",), SPECS)


def _everything(mode: ForwardMode, lens: list[int]) -> ForwardBatch:
    """A batch with every optional field that the mode may have."""
    width = 1 if mode.is_decode else 2
    _, batch = GraphWorld().step(mode, lens, [width] * len(lens))
    b = batch.batch_size
    extra: dict[str, Any] = {
        "state": LinearState(
            slots=torch.arange(1, b + 1, dtype=torch.int32),
            has_initial_state=torch.ones(b, dtype=torch.bool),
            track_slots=torch.arange(1, b + 1, dtype=torch.int32),
            track_lens=torch.ones(b, dtype=torch.int64),
        ),
        "encoder_lens": torch.full((b,), 4),
        "encoder_lens_cpu": (4,) * b,
        "encoder_new_lens_cpu": (0,) * b,
    }
    if width > 1:
        parents = torch.tensor([[-1, 0]]).repeat(b, 1)
        extra["spec_info"] = SpecInfo(
            2, parents=parents, accept_lens=torch.ones(b, dtype=torch.int32), mask_seq_lens=batch.seq_lens
        )
    return batch.replace(**extra)


def _same(path: str, a: Any, b: Any) -> None:
    if isinstance(b, torch.Tensor):
        assert torch.equal(a, b), path
        assert a.dtype == b.dtype, path
    elif isinstance(b, Mapping):
        assert a.keys() == b.keys(), path
        for key in b:
            _same(f"{path}[{key}]", a[key], b[key])
    elif dataclasses.is_dataclass(b):
        for one in dataclasses.fields(b):
            _same(f"{path}.{one.name}", getattr(a, one.name), getattr(b, one.name))
    elif isinstance(b, BaseModel):
        for name in type(b).model_fields:
            if name != "uses_graph_buffers":
                _same(f"{path}.{name}", getattr(a, name), getattr(b, name))
    else:
        assert a == b, path


@pytest.mark.parametrize("pad_to", [2, 4])
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND])
def test_a_loaded_batch_equals_the_padded_one_in_every_field(mode: ForwardMode, pad_to: int) -> None:
    buffers = BatchBuffers(4, 8, CPU, draft_token_num=2)
    buffers.load(_everything(mode, [9] * 4))
    batch = _everything(mode, [5, 7])
    view, padded = buffers.load(batch, pad_to=pad_to, seq_len_fill=1), batch.pad(pad_to, seq_len_fill=1)
    plan = padded.kv_loc_plan
    assert plan is not None
    _same("batch", view.replace(uses_graph_buffers=False), padded)
    assert view.uses_graph_buffers
    assert view.seq_lens.data_ptr() == buffers.seq_lens.data_ptr()
    assert view.kv_loc_plan is not None
    slots = view.kv_loc_plan.write_slots[KVSpace.FULL]
    assert slots.data_ptr() == buffers.write_slots[KVSpace.FULL].data_ptr()
    assert slots[batch.num_tokens :].eq(0).all()


def test_padding_writes_the_sink_that_the_pool_names() -> None:
    buffers = BatchBuffers(4, 4, CPU, sink_slot=9)
    view = buffers.load(_everything(ForwardMode.DECODE, [5, 7]), pad_to=4)
    assert view.out_cache_loc[2:].tolist() == [9, 9]
    assert view.kv_loc_plan is not None
    assert view.kv_loc_plan.write_slots[KVSpace.FULL][2:].tolist() == [9, 9]
    buffers.clear()
    assert buffers.out_cache_loc.tolist() == [9] * 4


def test_a_batch_without_room_names_what_it_asks() -> None:
    buffers = BatchBuffers(2, 2, CPU, spaces=())
    with pytest.raises(BatchError) as caught:
        buffers.load(_everything(ForwardMode.TARGET_VERIFY, [5, 7]), pad_to=4)
    assert caught.value.problems == (
        "4 requests and 8 tokens; the graph's buffers hold 2 and 2",
        "the step writes to the full space; the graph's buffers lack it",
        "a draft window of 2; the graph's buffers hold 0",
    )


def test_metadata_is_walked_through_dataclasses_tuples_mappings_lists_and_slots() -> None:
    from typing import NamedTuple

    class Pair(NamedTuple):
        left: torch.Tensor
        rest: list[torch.Tensor]

    class Slotted:
        __slots__ = ("inner", "unset")

    t, slotted = torch.zeros(1), Slotted()
    slotted.inner = {"k": Pair(t, [t])}
    backend = TableBackend(GraphWorld().env)
    backend.forward_metadata = (slotted, len)
    assert list(metadata_tensors(backend)) == [
        "table.forward_metadata[0].inner['k'].left",
        "table.forward_metadata[0].inner['k'].rest[0]",
    ]


def test_default_buckets_end_at_the_limit_and_waste_at_most_an_eighth() -> None:
    sizes = batch_buckets(300)
    assert sizes[:5] == (1, 2, 4, 8, 16)
    assert sizes[-1] == 300
    assert sizes == tuple(sorted(set(sizes)))
    for n in range(65, 301):
        assert bucket_for(n, sizes) <= n * 1.125 + 1
    assert len(sizes) < 40
    assert bucket_for(301, sizes) is None
    tokens = token_buckets(2048)
    assert tokens[-1] == 2048
    assert all(bucket_for(n, tokens) <= max(n + 15, n * 1.25 + 1) for n in range(8, 2049))


def test_configured_buckets_beyond_the_limit_are_refused() -> None:
    assert batch_buckets(8, (8, 2, 2)) == (2, 8)
    with pytest.raises(ConfigError, match=r"graph buckets \[0, 16\] with a limit of 8"):
        batch_buckets(8, (0, 4, 16))
