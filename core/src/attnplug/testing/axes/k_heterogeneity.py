"""Axis K: layers of one model that differ, under one step's metadata."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...modes import AttentionType, ForwardMode
from ...spec import Feature
from ..bench import Bench
from ..case import Case, LayerCase
from ..plan import Plan
from ..subject import Subject
from .axis import Axis, Check, Outcome


def _cases(plan: Plan) -> Iterator[Case]:
    if not plan.softmax:
        return
    for mode in plan.modes:
        if mode.is_target_verify and not plan.has(Feature.CHAIN_VERIFY):
            continue
        alike = tuple(_semantics(plan, mode))
        if len(alike) > 1:
            yield plan.case("K", "semantics", mode, layers=alike)
        if plan.has(Feature.HETEROGENEOUS_LAYERS):
            shapes = tuple(_shapes(plan))
            if len(shapes) > 1:
                yield plan.case("K", "shapes", mode, layers=shapes)
                # A first layer with the most heads would hide a plan made of the first layer's.
                yield plan.case("K", "shapes", mode, layers=shapes[::-1])
                both = tuple(
                    layer if i % 2 else _also(layer, plan, mode) for i, layer in enumerate((*shapes, *shapes[:1]))
                )
                yield plan.case("K", "shapes_and_semantics", mode, layers=both)


def _semantics(plan: Plan, mode: ForwardMode) -> Iterator[LayerCase]:
    windows = plan.has(Feature.SLIDING_WINDOW) and mode is not ForwardMode.DLLM_EXTEND
    yield plan.layer()
    if windows:
        yield plan.layer(window=3)
        yield plan.layer(window=24)
    if plan.has(Feature.SOFTCAP):
        yield plan.layer(cap=2.0)
        yield plan.layer(cap=6.0)
    if plan.has(Feature.SINKS):
        yield plan.layer(sinks=True)
    if plan.has(Feature.KV_SCALES):
        yield plan.layer(k_scale=2.0, v_scale=0.5)
    yield plan.layer(scaling=0.3)
    if plan.has(Feature.BIDIRECTIONAL) and mode is ForwardMode.EXTEND:
        yield plan.layer(attn=AttentionType.DECODER_BIDIRECTIONAL)
    yield plan.layer()


def _shapes(plan: Plan) -> Iterator[LayerCase]:
    dims, groups = plan.head_dims or (plan.layer().dim,), plan.groups
    for i in range(max(min(3, len(dims)), min(4, len(groups)))):
        kv_heads = (2, 4, 1, 3)[i % 4]
        group = groups[i % len(groups)]
        yield plan.layer(heads=kv_heads * group, kv_heads=kv_heads, dim=dims[i % min(3, len(dims))])


def _also(layer: LayerCase, plan: Plan, mode: ForwardMode) -> LayerCase:
    changes: dict[str, Any] = {}
    if plan.has(Feature.SLIDING_WINDOW) and mode is not ForwardMode.DLLM_EXTEND:
        changes["window"] = 5
    if plan.has(Feature.SINKS):
        changes["sinks"] = True
    return replace(layer, **changes)


def _in_two_orders(subject: Subject, case: Case) -> Outcome:
    """Run all layers under one plan, then again in reverse under another."""
    bench = Bench(subject, case)
    bench.prove(bench.step())
    bench.prove(bench.step(), layers=list(range(len(case.layers)))[::-1])
    return Outcome(served_by=bench.served_by)


AXIS = Axis(
    "K",
    "layers that differ",
    _cases,
    {
        "semantics": Check("layers that differ in window, cap, sinks, scales or scaling share a step", _in_two_orders),
        "shapes": Check("layers that differ in heads and head dimensions share a step", _in_two_orders),
        "shapes_and_semantics": Check("layers that differ in shapes and semantics share a step", _in_two_orders),
    },
)
