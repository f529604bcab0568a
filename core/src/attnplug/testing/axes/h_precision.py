"""Axis H: stored precision, states that merge, and results that do not depend on company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...modes import ForwardMode, MlaForm
from ...spec import Feature, Kind
from ..case import Case
from ..plan import Plan
from .a_semantics import mla_cases
from .axis import Axis, Check, oracle_check
from .h_checks import batch_invariance, dtype_pair, merged_halves, saturate

_MODES = (ForwardMode.EXTEND, ForwardMode.DECODE)


def _cases(plan: Plan) -> Iterator[Case]:
    modes = [mode for mode in _MODES if mode in plan.modes]
    if plan.softmax:
        for mode in modes:
            for dtype in plan.dtypes:
                if dtype in plan.spec.kv_dtypes:
                    yield from _dtype(plan, mode, dtype)
            yield from _fp8(plan, mode)
            yield from _pairs(plan, mode)
            if plan.has(Feature.LSE):
                yield from _lse(plan, mode)
        if plan.has(Feature.LSE) and ForwardMode.DECODE in plan.modes:
            for fields in _state_layers(plan):
                spans = {"queries": (1, 1), "prefix": (20, 44)}
                yield plan.case("H", "merged_halves", ForwardMode.DECODE, plan.layer(**fields), lse=True, **spans)
        if plan.has(Feature.DETERMINISTIC):
            for mode in plan.modes:
                yield from _alone(plan, mode)
    if Kind.MLA in plan.spec.kinds:
        for dtype in plan.dtypes[1:]:
            if dtype in plan.spec.kv_dtypes:
                yield from mla_cases(plan, "H", "dtype", dtype=dtype, kv_dtype="")
        if plan.has(Feature.LSE):
            for case in mla_cases(plan, "H", "lse"):
                yield case.replace(lse=True)
        if plan.has(Feature.KV_SCALES):
            yield from _latent_scales(plan)


def _latent_scales(plan: Plan) -> Iterator[Case]:
    """Latent rows are stored by k_scale, keys and values alike; a v_scale of another value is nobody's."""
    for kv_dtype in plan.fp8_dtypes:
        for case in mla_cases(plan, "H", "fp8", kv_dtype=kv_dtype):
            layer = replace(case.layers[0], k_scale=0.37, v_scale=1.7)
            if case.mla == MlaForm.ABSORBED.value and case.mode in _MODES:
                yield case.with_layers([layer])
                yield case.with_layers([layer]).replace(save=False)


def _dtype(plan: Plan, mode: ForwardMode, dtype: str) -> Iterator[Case]:
    yield plan.case("H", "dtype", mode, dtype=dtype, kv_dtype="")
    if plan.has(Feature.SLIDING_WINDOW, Feature.SOFTCAP, Feature.SINKS):
        layer = plan.layer(window=9, cap=3.0, sinks=True)
        yield plan.case("H", "dtype", mode, layer, dtype=dtype, kv_dtype="")
    if plan.has(Feature.LSE):
        yield plan.case("H", "lse", mode, dtype=dtype, kv_dtype="", lse=True)


def _fp8(plan: Plan, mode: ForwardMode) -> Iterator[Case]:
    scales = [(1.0, 1.0)]
    if plan.has(Feature.KV_SCALES):
        # Neither equal nor powers of two: a swapped, forgotten or doubled one shows.
        scales += [(0.37, 1.7), (2.5, 0.11)]
    for kv_dtype in plan.fp8_dtypes:
        dtype = plan.dtype
        for k_scale, v_scale in scales:
            layer = plan.layer(k_scale=k_scale, v_scale=v_scale)
            for page in plan.pages[:2]:
                yield plan.case("H", "fp8", mode, layer, dtype=dtype, kv_dtype=kv_dtype, page=page)
            for layout in plan.layouts[1:]:
                yield plan.case("H", "fp8", mode, layer, dtype=dtype, kv_dtype=kv_dtype, layout=layout)
        yield plan.case("H", "saturate", mode, dtype=dtype, kv_dtype=kv_dtype)
        if plan.has(Feature.SLIDING_WINDOW):
            yield plan.case("H", "fp8", mode, plan.layer(window=9), dtype=dtype, kv_dtype=kv_dtype)


def _pairs(plan: Plan, mode: ForwardMode) -> Iterator[Case]:
    wide = [dtype for dtype in plan.spec.kv_dtypes if not dtype.startswith("float8")]
    for dtype in plan.dtypes:
        for kv_dtype in sorted(wide):
            if kv_dtype != dtype:
                yield plan.case("H", "dtype_pair", mode, dtype=dtype, kv_dtype=kv_dtype)
    for dtype in plan.dtypes[1:]:
        for kv_dtype in plan.fp8_dtypes:
            yield plan.case("H", "dtype_pair", mode, dtype=dtype, kv_dtype=kv_dtype)


def _state_layers(plan: Plan) -> Iterator[dict[str, Any]]:
    yield {}
    if plan.has(Feature.SINKS):
        yield {"sinks": True}
    if plan.has(Feature.SOFTCAP):
        yield {"cap": 3.0}


def _lse(plan: Plan, mode: ForwardMode) -> Iterator[Case]:
    for fields in _state_layers(plan):
        yield plan.case("H", "lse", mode, plan.layer(**fields), lse=True)
    if plan.has(Feature.SLIDING_WINDOW):
        yield plan.case("H", "lse", mode, plan.layer(window=5), lse=True)


def _alone(plan: Plan, mode: ForwardMode) -> Iterator[Case]:
    forms = plan.verify_forms()[:1] if mode.is_target_verify else ("",)
    for mask in forms:
        for dtype in plan.dtypes[:2]:
            fields: dict[str, Any] = {
                "dtype": dtype,
                "kv_dtype": "" if dtype in plan.spec.kv_dtypes else plan.kv_dtype,
                "mask": mask,
            }
            yield plan.case("H", "batch_invariance", mode, **fields)
            if mode is ForwardMode.EXTEND:
                # Long requests of one shape, which may share a call.
                yield plan.case("H", "batch_invariance", mode, queries=(20, 20), prefix=(33, 33), **fields)
            if plan.has(Feature.SLIDING_WINDOW, Feature.SINKS) and mode is not ForwardMode.DLLM_EXTEND:
                yield plan.case("H", "batch_invariance", mode, plan.layer(window=9, sinks=True), **fields)


AXIS = Axis(
    "H",
    "precision",
    _cases,
    {
        "dtype": oracle_check("each declared dtype is computed to its own precision"),
        "dtype_pair": Check(
            "a pool of another dtype than the model's is computed right, or refused with reasons", dtype_pair
        ),
        "fp8": oracle_check("an fp8 pool holds x / scale: keys by k_scale, values by v_scale"),
        "saturate": Check(
            "values beyond an fp8 dtype's range are stored as its largest, not as NaN or infinity", saturate
        ),
        "lse": oracle_check("the LSE is a natural log over scaled, capped and masked scores; sinks are left out"),
        "merged_halves": Check("states over two halves of the keys merge into attention over both", merged_halves),
        "batch_invariance": Check(
            "a row's result is bitwise the same alone, in company, and in any order", batch_invariance
        ),
    },
)
