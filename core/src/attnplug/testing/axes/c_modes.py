"""Axis C: every mode with every feature, inside every wrapper; and steps that must add up to one another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...modes import ForwardMode, MlaForm
from ...spec import Feature, Kind
from ..case import Case, LayerCase
from ..plan import Plan
from ..subject import WRAPPERS
from .a_semantics import mla_cases
from .axis import Axis, Check, oracle_check
from .c_steps import (
    chunked,
    empty_request,
    encoder_mirror,
    generate,
    idle,
    mixed_parts,
    no_mirror,
    sliced,
    split_prefill,
    tree_after_plan,
    upper_bounds,
)

_FEATURES: tuple[tuple[tuple[Feature, ...], dict[str, Any]], ...] = (
    ((), {}),
    ((Feature.SLIDING_WINDOW,), {"window": 9}),
    ((Feature.SOFTCAP,), {"cap": 3.0}),
    ((Feature.SINKS,), {"sinks": True}),
    ((Feature.KV_SCALES,), {"k_scale": 2.0, "v_scale": 0.5}),
    ((Feature.SLIDING_WINDOW, Feature.SOFTCAP, Feature.SINKS), {"window": 9, "cap": 3.0, "sinks": True}),
)
_UNIFORM = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


def _cases(plan: Plan) -> Iterator[Case]:
    if plan.softmax:
        for mode in plan.modes:
            for mask in plan.verify_forms() if mode.is_target_verify else ("",):
                yield from _product(plan, mode, mask)
        yield from _identities(plan)
    if Kind.MLA in plan.spec.kinds:
        yield from _latent(plan)
    if ForwardMode.IDLE in plan.spec.modes and plan.softmax:
        yield plan.case("C", "idle", ForwardMode.IDLE, queries=(), prefix=())
        yield plan.case("C", "idle", ForwardMode.IDLE, queries=(), prefix=(), pad=3)
        if plan.has(Feature.LSE):
            yield plan.case("C", "idle", ForwardMode.IDLE, queries=(), prefix=(), pad=2, lse=True)


def _product(plan: Plan, mode: ForwardMode, mask: str) -> Iterator[Case]:
    layers = list(_layers(plan, mode))
    for layer in layers:
        for page in plan.pages[:3] if not plan.full else plan.pages:
            yield plan.case("C", "mode", mode, layer, mask=mask, page=page)
        if plan.has(Feature.LSE):
            yield plan.case("C", "mode", mode, layer, mask=mask, lse=True)
    for layer in (layers[0], layers[-1]):
        # The features together stand for each: a wrapper routes, and what it routes is proven above.
        for wrap in WRAPPERS:
            yield plan.case("C", "wrapped", mode, layer, mask=mask, wrap=wrap)
        yield plan.case("C", "no_save", mode, layer, mask=mask, save=False)
        if mode in _UNIFORM:
            yield plan.case("C", "padded", mode, layer, mask=mask, pad=3)
            yield plan.case("C", "padded", mode, layer, mask=mask, pad=2, wrap="two_batch")
        yield plan.case("C", "sliced", mode, layer, mask=mask)
    if plan.has(Feature.LSE):
        yield plan.case("C", "wrapped", mode, layers[0], mask=mask, wrap="two_batch", lse=True)
    one = plan.case("C", "wrapped", mode, layers[0], mask=mask, wrap="two_batch")
    yield one.replace(queries=one.queries[:1], prefix=one.prefix[:1])


def _latent(plan: Plan) -> Iterator[Case]:
    """MLA where a step is not the plain one: nothing stored, padding, parts, trees."""
    for case in mla_cases(plan, "C", "no_save", save=False):
        if case.mla != MlaForm.CHUNKED_PREFIX.value:
            yield case
    for case in mla_cases(plan, "C", "mode"):
        if case.mla != MlaForm.ABSORBED.value:
            continue
        if case.mode in _UNIFORM:
            yield case.replace(check="padded", pad=3)
        if case.mode is ForwardMode.DECODE:
            yield case.replace(check="sliced")
            yield case.replace(check="wrapped", wrap="two_batch")
        if case.mode is ForwardMode.TARGET_VERIFY:
            for mask in plan.verify_forms()[1:]:
                yield case.replace(mask=mask)


def _layers(plan: Plan, mode: ForwardMode) -> Iterator[Any]:
    for features, fields in _FEATURES:
        windowed = Feature.SLIDING_WINDOW in features
        # The contract gives a window no meaning inside a bidirectional block.
        if plan.has(*features) and not (windowed and mode is ForwardMode.DLLM_EXTEND):
            yield plan.layer(**fields)


def _identities(plan: Plan) -> Iterator[Case]:
    layers = [plan.layer()]
    if plan.has(Feature.SLIDING_WINDOW):
        layers.append(plan.layer(window=7))
    for layer in layers:
        if ForwardMode.EXTEND in plan.modes:
            for chunk in (1, 7, 16):
                fields = {"queries": (40, 3, 25), "prefix": (0, 5, 0), "arg": str(chunk)}
                yield plan.case("C", "chunked", ForwardMode.EXTEND, layer, **fields)
            if ForwardMode.DECODE in plan.modes:
                fields = {"queries": (20, 6, 33), "prefix": (0, 17, 0), "arg": "4"}
                yield plan.case("C", "generate", ForwardMode.EXTEND, layer, **fields)
                yield plan.case("C", "generate", ForwardMode.EXTEND, layer, wrap="hybrid", **fields)
            yield plan.case("C", "empty_request", ForwardMode.EXTEND, layer, queries=(5, 0, 9), prefix=(3, 8, 0))
        # Requests of like lengths that do not follow each other: who puts them together must take them apart again.
        if ForwardMode.DECODE in plan.modes:
            fields = {"queries": (1,) * 6, "prefix": (7, 70, 9, 75, 3, 71)}
            yield plan.case("C", "interleaved", ForwardMode.DECODE, layer, **fields)
        if ForwardMode.EXTEND in plan.modes:
            fields = {"queries": (3, 20, 3, 20, 3), "prefix": (5, 28, 8, 33, 60)}
            yield plan.case("C", "interleaved", ForwardMode.EXTEND, layer, **fields)
            for page in plan.pages[:2]:
                fields = {"queries": (3, 20, 3, 20, 3), "prefix": (5, 33, 8, 33, 60)}
                yield plan.case("C", "interleaved", ForwardMode.EXTEND, layer, page=page, **fields)
        if ForwardMode.MIXED in plan.modes and ForwardMode.DECODE in plan.modes:
            yield plan.case("C", "mixed_parts", ForwardMode.MIXED, layer)
        if ForwardMode.SPLIT_PREFILL in plan.modes:
            yield plan.case("C", "split_prefill", ForwardMode.SPLIT_PREFILL, layers=(layer, layer, plan.layer()))
        if ForwardMode.TARGET_VERIFY in plan.modes and plan.has(Feature.CUSTOM_MASK):
            for mask in ("qlen", "full"):
                yield plan.case("C", "tree_after_plan", ForwardMode.TARGET_VERIFY, plan.layer(), mask=mask)
                for lse in (False, True) if plan.has(Feature.LSE) else (False,):
                    yield plan.case("C", "blind", ForwardMode.TARGET_VERIFY, layer, mask=mask, arg="blind", lse=lse)
                if plan.has(Feature.SLIDING_WINDOW):
                    # Windows that end inside the tree.
                    for w in (0, 1):
                        yield plan.case("C", "mode", ForwardMode.TARGET_VERIFY, plan.layer(window=w), mask=mask)
    if plan.has(Feature.CROSS_ATTENTION) and ForwardMode.DECODE in plan.modes:
        pair = (plan.layer(), plan.layer(cross=True))
        for lse in (False, True) if plan.has(Feature.LSE) else (False,):
            yield plan.case("C", "no_encoder", ForwardMode.DECODE, layers=pair, encoder=(9, 0, 37, 0), lse=lse)
        yield plan.case("C", "encoder_mirror", ForwardMode.DECODE, layers=pair, encoder=(9, 0, 37, 2))
    yield from _host_lengths(plan, layers)


def _host_lengths(plan: Plan, layers: list[LayerCase]) -> Iterator[Case]:
    """Decode and verify, whose exact lengths the host may not know."""
    for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
        if mode not in plan.modes:
            continue
        for mask in plan.verify_forms() if mode.is_target_verify else ("",):
            for layer in layers:
                yield plan.case("C", "upper_bounds", mode, layer, mask=mask)
                if not plan.spec.needs_cpu_seq_lens:
                    yield plan.case("C", "no_mirror", mode, layer, mask=mask)


AXIS = Axis(
    "C",
    "modes and wrappers",
    _cases,
    {
        "mode": oracle_check("every declared mode computes every declared feature"),
        "wrapped": oracle_check("inside a wrapper the result is the same"),
        "no_save": oracle_check("save_kv_cache=False computes with the new rows and writes nothing"),
        "padded": oracle_check("padding requests change nothing, give finite rows and write only the sink"),
        "no_encoder": oracle_check("a request without encoder positions gets zeros"),
        "sliced": Check("the parts of a batch give what the whole gives", sliced),
        "chunked": Check("a prefill in chunks gives what one prefill gives", chunked),
        "generate": Check("decode reads what prefill wrote, token after token", generate),
        "mixed_parts": Check("a mixed step gives what its extend and decode parts give", mixed_parts),
        "split_prefill": Check(
            "layers of a step may run in several calls, each with metadata of its own", split_prefill
        ),
        "empty_request": Check("a request without new tokens takes no rows and disturbs nobody", empty_request),
        "idle": Check("an idle step gives zeros of the right shape, an LSE of −inf, and touches no pool", idle),
        "interleaved": oracle_check(
            "requests of like lengths may be computed together, wherever they stand in the batch"
        ),
        "blind": oracle_check(
            "a draft sees nothing of the window, or nothing at all: then it gets zeros and an LSE of −inf"
        ),
        "encoder_mirror": Check(
            "without encoder lengths on the host the result is the same, or a reasoned refusal", encoder_mirror
        ),
        "upper_bounds": Check(
            "host lengths that are upper bounds give the same result, or a reasoned refusal", upper_bounds
        ),
        "no_mirror": Check("a backend that declares no need of host lengths reads none", no_mirror),
        "tree_after_plan": Check(
            "a tree that drafting fills after planning is the one that is verified", tree_after_plan
        ),
    },
)
