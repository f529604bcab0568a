"""What comes before a capture, and what is left where one is refused."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from attnplug.errors import ConfigError
from attnplug.graphs.breakable import BreakableGraphRunner
from attnplug.graphs.capture import CudaGraphs
from attnplug.graphs.full import GraphRunner

from .graph_world import GraphWorld
from .table_backend import TableBackend

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("buckets", "words"),
    [((), "no graph bucket is given"), ((0, 4), r"graph buckets \[0\]"), ((-2, 1.5, 4), r"graph buckets \[-2, 1.5\]")],
)
def test_a_runner_refuses_sizes_that_no_step_has(buckets, words: str) -> None:
    world = GraphWorld()
    with pytest.raises(ConfigError, match=words):
        GraphRunner(world.model, TableBackend(world.env), buckets=buckets, device=CPU)
    with pytest.raises(ConfigError, match=words):
        BreakableGraphRunner(world.model, TableBackend(world.env), buckets=buckets, max_requests=2, device=CPU)


def test_a_refused_warm_up_is_waited_for_before_its_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[str, str]] = []

    def stream(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: waits.append((name, other.name)))

    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream("side"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream("outer"))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    with pytest.raises(ValueError, match="refused"), CudaGraphs(CPU).region():
        raise ValueError("refused")
    assert waits == [("side", "outer"), ("outer", "side")]
