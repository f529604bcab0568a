"""Axis J: whatever is not declared is refused with its reason, before any kernel runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...modes import AttentionType, ForwardMode, MlaForm
from ...spec import Feature, Kind
from ..case import Case, LayerCase
from ..plan import DTYPES, FP8, GROUPS, HEAD_DIMS, LATENTS, PAGES, ROPES, Plan, choose, undeclared
from .axis import Axis, Check
from .j_checks import bad_batch, refuses_case, refuses_kind

_LAYER_FEATURES: dict[Feature, dict[str, Any]] = {
    Feature.SLIDING_WINDOW: {"window": 4},
    Feature.SINKS: {"sinks": True},
    Feature.SOFTCAP: {"cap": 5.0},
    Feature.KV_SCALES: {"k_scale": 2.0, "v_scale": 0.5},
    Feature.ENCODER_ONLY: {"attn": AttentionType.ENCODER_ONLY},
    Feature.BIDIRECTIONAL: {"attn": AttentionType.DECODER_BIDIRECTIONAL},
}
BAD_BATCHES = ("batch_size", "num_tokens", "context", "device", "mirror")


def _cases(plan: Plan) -> Iterator[Case]:
    usual = frozenset({ForwardMode.EXTEND, ForwardMode.DECODE})
    modes = tuple(mode for mode in plan.modes if mode in usual) or plan.modes[:1]
    if not modes:
        return
    for kind in Kind:
        if kind not in plan.spec.kinds:
            yield _asking(plan, "kind", modes[0], f"kinds.{kind.value}")
    if not plan.softmax:
        return
    for mode in ForwardMode:
        if mode not in plan.spec.modes and mode is not ForwardMode.IDLE:
            yield _asking(plan, "undeclared", mode, f"modes.{mode.value}")
    for mode in modes:
        yield from _features(plan, mode)
        yield from _storage(plan, mode)
        yield from _dims(plan, mode)
        for what in BAD_BATCHES:
            if what != "mirror" or plan.spec.needs_cpu_seq_lens:
                yield _asking(plan, "bad_batch", mode, what)
    yield from _verify(plan)
    yield from _mla(plan, modes[0])


def _asking(plan: Plan, check: str, mode: ForwardMode, arg: str, layer: LayerCase | None = None, **fields: Any) -> Case:
    return plan.case("J", check, mode, layer, arg=arg, **fields)


def _features(plan: Plan, mode: ForwardMode) -> Iterator[Case]:
    for feature, changes in _LAYER_FEATURES.items():
        if not plan.has(feature):
            fresh = {"prefix": (0,) * 3, "queries": (5, 1, 9)} if feature is Feature.ENCODER_ONLY else {}
            if feature is not Feature.ENCODER_ONLY or mode is ForwardMode.EXTEND:
                yield _asking(plan, "undeclared", mode, f"features.{feature.value}", plan.layer(**changes), **fresh)
    if not plan.has(Feature.CROSS_ATTENTION):
        layers = (plan.layer(cross=True), plan.layer())
        batch = len(plan.case("J", "undeclared", mode).queries)
        arg, encoder = f"features.{Feature.CROSS_ATTENTION.value}", (9, 4, 7, 2)[:batch]
        yield _asking(plan, "undeclared", mode, arg, layers=layers, encoder=encoder)
    if not plan.has(Feature.V_HEAD_DIM):
        narrow = plan.layer(dim=64, v_dim=32)
        yield _asking(plan, "undeclared", mode, f"features.{Feature.V_HEAD_DIM.value}", narrow)
    if not plan.has(Feature.HETEROGENEOUS_LAYERS):
        one, group = plan.layer(), plan.groups[0]
        other = plan.layer(heads=4 * group, kv_heads=4)
        yield _asking(plan, "undeclared", mode, f"features.{Feature.HETEROGENEOUS_LAYERS.value}", layers=(one, other))
    if not plan.has(Feature.LSE):
        yield _asking(plan, "undeclared", mode, f"features.{Feature.LSE.value}", lse=True)
    if not plan.has(Feature.DETERMINISTIC):
        yield _asking(plan, "undeclared", mode, f"features.{Feature.DETERMINISTIC.value}")


def _storage(plan: Plan, mode: ForwardMode) -> Iterator[Case]:
    for page in undeclared(PAGES, plan.spec.page_sizes):
        yield _asking(plan, "undeclared", mode, f"page_sizes.{page}", page=page)
    for dtype in DTYPES:
        if dtype not in plan.spec.dtypes:
            yield _asking(
                plan, "undeclared", mode, f"dtypes.{dtype}", dtype=dtype, kv_dtype=plan.kv_dtype or plan.dtype
            )
    for kv_dtype in (*DTYPES, *FP8):
        if kv_dtype not in plan.spec.kv_dtypes:
            yield _asking(plan, "undeclared", mode, f"kv_dtypes.{kv_dtype}", kv_dtype=kv_dtype)
    for layout in ("NHD", "HND"):
        if layout not in plan.spec.kv_layouts:
            yield _asking(plan, "undeclared", mode, f"kv_layouts.{layout}", layout=layout)


def _dims(plan: Plan, mode: ForwardMode) -> Iterator[Case]:
    for dim in undeclared(HEAD_DIMS, plan.spec.head_dims):
        yield _asking(plan, "undeclared", mode, f"head_dims.{dim}", plan.layer(dim=dim, v_dim=0))
    for group in undeclared(GROUPS, plan.spec.group_sizes):
        layer = plan.layer(heads=group, kv_heads=1)
        yield _asking(plan, "undeclared", mode, f"group_sizes.{group}", layer)


def _verify(plan: Plan) -> Iterator[Case]:
    verify = ForwardMode.TARGET_VERIFY
    if verify not in plan.spec.modes:
        return
    for feature, mask in ((Feature.CHAIN_VERIFY, ""), (Feature.CUSTOM_MASK, "qlen")):
        if not plan.has(feature):
            yield _asking(plan, "undeclared", verify, f"features.{feature.value}", mask=mask)


def _mla(plan: Plan, mode: ForwardMode) -> Iterator[Case]:
    if Kind.MLA not in plan.spec.kinds:
        return
    latent, rope = choose(LATENTS, plan.spec.kv_lora_ranks)[0], choose(ROPES, plan.spec.rope_head_dims)[0]
    for form in MlaForm:
        if not plan.has(Feature(f"mla_{form.value}")):
            layer = LayerCase(heads=4, kv_heads=4, dim=192, v_dim=128, kind=Kind.MLA, latent=latent, rope=rope)
            arg = f"features.mla_{form.value}"
            yield _asking(plan, "undeclared", mode, arg, layer, mla=form.value, save=False)


AXIS = Axis(
    "J",
    "refusal",
    _cases,
    {
        "undeclared": Check("what is not declared is refused with its reason, before any kernel", refuses_case),
        "kind": Check(
            "a layer of a kind that is not declared is refused with its reason, before any kernel", refuses_kind
        ),
        "bad_batch": Check("a batch beyond the limits, or on another device, is refused before any kernel", bad_batch),
    },
)
