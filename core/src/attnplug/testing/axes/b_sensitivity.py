"""Axis B: each feature changes the output when it is switched on, and reaches the layer that asks for it alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...modes import AttentionType, ForwardMode
from ...spec import Feature
from ..bench import Bench
from ..case import Case
from ..expected import expect
from ..plan import Plan
from ..results import Failure
from ..subject import Subject
from .axis import Axis, Check, Outcome, oracle_check

SWITCHES: dict[str, tuple[Feature | None, dict[str, Any]]] = {
    "window": (Feature.SLIDING_WINDOW, {"window": 6}),
    "cap": (Feature.SOFTCAP, {"cap": 2.0}),
    "sinks": (Feature.SINKS, {"sinks": True}),
    "scaling": (None, {"scaling": 0.45}),
    "bidirectional": (Feature.BIDIRECTIONAL, {"attn": AttentionType.DECODER_BIDIRECTIONAL}),
}
"""Name → the feature it needs, and what a layer has when it is on."""
_OFF: dict[str, dict[str, Any]] = {
    "window": {"window": -1},
    "cap": {"cap": 0.0},
    "sinks": {"sinks": False},
    "scaling": {"scaling": 0.0},
    "bidirectional": {"attn": AttentionType.DECODER},
}


def _cases(plan: Plan) -> Iterator[Case]:
    if not plan.softmax:
        return
    for mode in plan.modes:
        if mode is ForwardMode.TARGET_VERIFY and not plan.has(Feature.CHAIN_VERIFY):
            continue
        for name, (feature, fields) in SWITCHES.items():
            if feature is not None and not plan.has(feature):
                continue
            # One query sees every key of a decode step, causal or not; verify and blocks have rules of their own.
            if name == "bidirectional" and mode is not ForwardMode.EXTEND:
                continue
            if name == "window" and mode is ForwardMode.DLLM_EXTEND:
                continue
            yield plan.case("B", "switch", mode, plan.layer(**fields), arg=name)
            layers = (plan.layer(), plan.layer(**fields), plan.layer())
            yield plan.case("B", "neighbours", mode, layers=layers, arg=name)
    if plan.has(Feature.KV_SCALES):
        layers = (plan.layer(), plan.layer(k_scale=0.5, v_scale=2.0), plan.layer(k_scale=2.0, v_scale=0.25))
        for mode in (ForwardMode.EXTEND, ForwardMode.DECODE):
            if mode in plan.modes:
                yield plan.case("B", "neighbours", mode, layers=layers, arg="scales")


def _switch(subject: Subject, case: Case) -> Outcome:
    bench = Bench(subject, case)
    step = bench.step()
    on = bench.prove(step)[0].out
    plain = Bench(subject, case.with_layers([replace(case.layers[0], **_OFF[case.arg])]))
    off = plain.prove()[0].out
    allowed = expect(bench.world, step, 0).allowed.out
    differs = ((on - off).double().abs().amax(dim=-1) > allowed).any(dim=1)
    if not bool(differs.any()):
        raise Failure(f"{case.arg} changes no row of the output", fault=f"{case.arg} ignored")
    return Outcome(served_by=bench.served_by)


AXIS = Axis(
    "B",
    "sensitivity",
    _cases,
    {
        "switch": Check("a feature changes the output when it is switched on, to what the oracle says", _switch),
        "neighbours": oracle_check("of layers that differ in one parameter, each is computed with its own"),
    },
)
