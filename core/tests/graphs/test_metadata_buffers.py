"""One builder for both: fresh tensors eagerly, slices of fixed ones under a graph; and their refusals."""

from __future__ import annotations

import pytest
import torch

from attnplug.errors import ConfigError, ContractViolation
from attnplug.graphs.buckets import batch_buckets, bucket_for, token_buckets
from attnplug.graphs.buffers import BatchBuffers
from attnplug.graphs.metadata_buffers import BufferSpec, FixedBuffers, FreshBuffers, GraphBufferSets
from attnplug.graphs.pointers import metadata_tensors
from attnplug.modes import ForwardMode, KVSpace

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


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY])
def test_a_loaded_batch_equals_the_padded_one_in_every_field(mode: ForwardMode) -> None:
    world = GraphWorld()
    new = [2, 2] if mode.is_target_verify else [1, 1]
    buffers = BatchBuffers(4, 8, CPU, draft_token_num=2)
    buffers.load(world.step(mode, [9] * 4, new * 2)[1])
    _, batch = world.step(mode, [5, 7], new)
    view, padded = buffers.load(batch, pad_to=4, seq_len_fill=1), batch.pad(4, seq_len_fill=1)
    assert view.uses_graph_buffers
    for name in type(batch).model_fields:
        a, b = getattr(view, name), getattr(padded, name)
        if isinstance(b, torch.Tensor):
            assert torch.equal(a, b), name
    assert view.seq_lens.data_ptr() == buffers.seq_lens.data_ptr()
    slots = view.kv_loc_plan.write_slots[KVSpace.FULL]
    assert slots[2 * new[0] :].eq(0).all()
    assert slots.data_ptr() == buffers.write_slots[KVSpace.FULL].data_ptr()


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
