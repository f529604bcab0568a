"""Axes D and E pass a right backend and name the fault of each broken one."""

from __future__ import annotations

from typing import Any

import pytest

from attnplug.backend import AttentionBackend
from attnplug.testing.results import Report, Status
from attnplug.testing.runner import run_suite

from .table_backend import (
    SPEC,
    TREE_SPEC,
    GroupsShareBuffers,
    InGraphTable,
    ItemInGraph,
    PaddingNotReset,
    RebuiltAtReplay,
    StaleWritesAtCapture,
    TableBackend,
    TableNotRefreshed,
    TooEarlyReadEnd,
    TreeOfTheCapture,
    TreeTable,
)


def run(backend: type[AttentionBackend], axes: tuple[str, ...], **options: Any) -> Report:
    declared = TREE_SPEC if issubclass(backend, TreeTable) else SPEC
    spec = declared.replace(dtypes=frozenset({"float32"}), kv_dtypes=frozenset({"float32"}))
    return run_suite(backend, spec, axes=axes, **options)


@pytest.mark.parametrize("backend", [TableBackend, InGraphTable])
def test_a_right_backend_is_proven_in_both_axes(backend: type[AttentionBackend]) -> None:
    report = run(backend, ("D", "E"))
    assert [(result.case, result.message) for result in report.failures] == []
    checks = {result.case.split(":")[1] for result in report.results}
    assert checks == {"replay", "groups", "recapture", "glue", "eager_read_end", "graph_read_end", "back_to_back"}
    modes = {result.case.split(":")[2] for result in report.results if result.status is Status.PROVEN}
    assert {"decode", "target_verify", "extend"} <= modes


def test_a_backend_that_reads_its_mask_anew_is_proven_with_trees() -> None:
    report = run(TreeTable, ("D",))
    assert [(result.case, result.message) for result in report.failures] == []
    trees = [result.case for result in report.results if result.case.startswith("D:tree:")]
    assert {mask for mask in ("qlen", "full") for case in trees if f"mask={mask}" in case} == {"qlen", "full"}


BROKEN = {
    ItemInGraph: ("D", "synchronises or depends on data in the graph", "item() in a captured region"),
    RebuiltAtReplay: ("D", "metadata moved between capture and replay", ".slots: captured at"),
    TableNotRefreshed: ("D", "metadata not refreshed: slots", "differs from an eager step's in table.forward_metadata"),
    GroupsShareBuffers: ("D", "layer groups share a graph buffer: slots", "written later, and an eager step keeps"),
    PaddingNotReset: ("D", "padding rows not reset", "padding requests"),
    StaleWritesAtCapture: ("D", "stale write slots at capture", "slots other than the sink's"),
    TreeOfTheCapture: ("D", "metadata not refreshed: seen", "differs from an eager step's in table.forward_metadata"),
    TooEarlyReadEnd: ("E", "reads shared tensors after PRE_REPLAY", "overwritten at PRE_REPLAY"),
}


@pytest.mark.parametrize("backend", BROKEN, ids=lambda one: one.__name__)
def test_a_broken_backend_is_caught_with_a_message_that_names_the_fault(backend: type[AttentionBackend]) -> None:
    axis, fault, words = BROKEN[backend]
    found = [(result.fault, result.message) for result in run(backend, (axis,), stop_after=4).failures]
    assert found
    assert any(fault == name and words in message for name, message in found), found
