"""An emulated graph obeys a CUDA graph's rules: same memory, no host work at replay, no sync, fixed shapes."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor

from attnplug.errors import ContractViolation
from attnplug.graphs.emulated import EmulatedGraph


def test_a_replay_reads_new_contents_of_the_captured_memory() -> None:
    x, graph = torch.ones(3), EmulatedGraph()
    with graph.capture():
        y = (x.view(3, 1) * 2).sum(1)
        total = torch.zeros(())
        total += y.sum()
    x.copy_(torch.tensor([1.0, 2.0, 3.0]))
    graph.replay()
    assert y.tolist() == [2, 4, 6]
    assert total.item() == 12
    graph.replay()
    assert total.item() == 12, "the captured fill runs again"


def test_host_work_runs_at_capture_only() -> None:
    ran: list[int] = []
    graph, x = EmulatedGraph(), torch.ones(2)
    with graph.capture():
        ran.append(1)
        y = x + len(ran)
    graph.replay()
    assert ran == [1]
    assert y.tolist() == [2, 2]


def test_results_keep_their_addresses() -> None:
    x, graph = torch.arange(4.0), EmulatedGraph()
    with graph.capture():
        y = x.softmax(0) @ torch.eye(4)
    address = y.data_ptr()
    graph.replay()
    assert y.data_ptr() == address


FAULTS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "tolist": lambda x: [float(v) for v in x],
    "nonzero": lambda x: x.nonzero(),
    "mask_index": lambda x: x[x > 0],
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, torch.ones(3, dtype=torch.int64)),
    "unique": lambda x: torch.unique(x),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "split_at_values": lambda x: x.tensor_split(x.long()),
    "tolist_at_once": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to_the_word_cpu": lambda x: x.to("cpu"),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: numpy.asarray(x),
    "index_of_a_list": lambda x: [1, 2, 3][x.long()[0]],
    "range": lambda x: range(x.long()[0]),
    "slice_by_a_value": lambda x: x[: x.long()[0]],
    "tensor_of_host_data": lambda x: torch.tensor([1.0]),
    "as_tensor_of_host_data": lambda x: torch.as_tensor([1.0]),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "list_index": lambda x: x[[0, 1]],
    "pinned": lambda x: x.pin_memory(),
    "one_hot_of_unknown_width": lambda x: torch.nn.functional.one_hot(x.long()),
    "resize": lambda x: x.clone().resize_(5),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_synchronising_and_data_dependent_operations_are_refused_with_their_line(fault: str) -> None:
    graph = EmulatedGraph()
    with (
        pytest.raises(ContractViolation, match=r"in a captured region (.|\n)*test_emulated_graph\.py:\d+"),
        graph.capture(),
    ):
        FAULTS[fault](torch.ones(3))
    assert graph.num_operations == 0, "a refused capture keeps nothing"


@pytest.mark.parametrize("allowed", ["scatter", "where", "sized_repeat"])
def test_fixed_shape_operations_are_allowed(allowed: str) -> None:
    x, graph = torch.ones(3), EmulatedGraph()
    at, value = torch.tensor([1]), torch.tensor([5.0])
    with graph.capture():
        if allowed == "scatter":
            x.index_copy_(0, at, value)
        elif allowed == "where":
            x = torch.where(x > 0, x, -x)
        else:
            x = torch.repeat_interleave(x, torch.ones(3, dtype=torch.int64), output_size=3)
    graph.replay()
    assert graph.num_operations > 0


def test_the_addresses_a_replay_reads_are_known() -> None:
    x, graph = torch.ones(3), EmulatedGraph()
    with graph.capture():
        y = x * 2
        y += 1
    assert x.untyped_storage().data_ptr() in graph.input_addresses()
    assert y.untyped_storage().data_ptr() not in graph.input_addresses()


@pytest.mark.parametrize("inference", [False, True], ids=["grad_mode", "inference_mode"])
def test_a_reshape_that_copies_is_replayed_and_one_that_views_follows_its_base(inference: bool) -> None:
    x, graph = torch.arange(6.0).view(2, 3), EmulatedGraph()
    with torch.inference_mode(inference), graph.capture():
        copied = x.t().reshape(6)
        viewed = x.reshape(6)
    x.mul_(2)
    graph.replay()
    assert copied.tolist() == x.t().reshape(6).tolist()
    assert viewed.tolist() == x.reshape(6).tolist()
