"""Axis A: the pinned semantics, each at the place where a slip shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ...modes import AttentionType, ForwardMode, MlaForm
from ...spec import Feature, Kind
from ..case import Case, LayerCase
from ..plan import HEAD_DIMS, LATENTS, ROPES, Plan, choose
from .axis import Axis, oracle_check

_DECODE, _EXTEND = ForwardMode.DECODE, ForwardMode.EXTEND


def _cases(plan: Plan) -> Iterator[Case]:
    if plan.softmax:
        # The plainest first: a fault of everything is then named by them, and not as a window's.
        yield from _causal(plan)
        for mode in (_EXTEND, _DECODE):
            if mode in plan.modes:
                yield from _window(plan, mode)
                yield from _scores(plan, mode)
                yield from _shapes(plan, mode)
        yield from _uncached(plan)
    if Kind.MLA in plan.spec.kinds:
        yield from mla_cases(plan, "A", "mla")


def _window(plan: Plan, mode: ForwardMode) -> Iterable[Case]:
    if not plan.has(Feature.SLIDING_WINDOW):
        return
    for w in (0, 3, 15, 32):
        layer = plan.layer(window=w)
        # Lengths one short of the window, exact, one and two beyond, and far beyond.
        lengths = (max(w, 1), w + 1, w + 2, w + 3, w + 40)
        if mode is _DECODE:
            spans = {"queries": (1,) * 5, "prefix": tuple(n - 1 for n in lengths)}
            yield plan.case("A", "window_edge", mode, layer, **spans)
            continue
        yield plan.case("A", "window_edge", mode, layer, queries=lengths, prefix=(0,) * 5)
        cached = tuple(max(n - 2, 0) for n in lengths)
        new = tuple(n - p for n, p in zip(lengths, cached, strict=True))
        yield plan.case("A", "window_edge", mode, layer, queries=new, prefix=cached)
        yield plan.case("A", "window_edge", mode, layer, queries=(w + 5, 3), prefix=(w + 2, 2 * w + 9))


def _scores(plan: Plan, mode: ForwardMode) -> Iterable[Case]:
    caps = (3.0, 30.0) if plan.has(Feature.SOFTCAP) else ()
    for cap in caps:
        yield plan.case("A", "soft_cap", mode, plan.layer(cap=cap))
    if plan.has(Feature.SINKS):
        yield plan.case("A", "sinks", mode, plan.layer(sinks=True))
        # As many KV heads as heads a group would hide which of the two is meant.
        for group in plan.groups[1:3]:
            yield plan.case("A", "sinks", mode, plan.layer(heads=3 * group, kv_heads=3, sinks=True))
    # The last one's scores reach some hundreds: exp overflows where the largest is not subtracted first.
    for scaling in (0.03, 0.4, 8.0):
        yield plan.case("A", "scaling", mode, plan.layer(scaling=scaling))
    pairs: list[tuple[Feature, dict[str, Any]]] = [
        (Feature.SINKS, {"sinks": True}),
        (Feature.SOFTCAP, {"cap": 4.0}),
        (Feature.SLIDING_WINDOW, {"window": 6}),
    ]
    for i, (one, first) in enumerate(pairs):
        for other, second in pairs[i + 1 :]:
            if plan.has(one, other):
                yield plan.case("A", "combined", mode, plan.layer(**first, **second))
    if plan.has(*(feature for feature, _ in pairs)):
        yield plan.case("A", "combined", mode, plan.layer(sinks=True, cap=4.0, window=6))


def _shapes(plan: Plan, mode: ForwardMode) -> Iterable[Case]:
    for group in plan.groups[: 7 if not plan.full else None]:
        for kv_heads in (1, 2) if group <= 16 else (1,):
            yield plan.case("A", "gqa", mode, plan.layer(heads=group * kv_heads, kv_heads=kv_heads))
    for dim in plan.head_dims:
        yield plan.case("A", "head_dim", mode, plan.layer(dim=dim))
    if plan.has(Feature.V_HEAD_DIM):
        for dim, v_dim in ((192, 128), (64, 128), (128, 64), (64, 32), (96, 64)):
            if dim in plan.spec.head_dims and v_dim in plan.spec.v_head_dims:
                yield plan.case("A", "v_head_dim", mode, plan.layer(dim=dim, v_dim=v_dim))


def _causal(plan: Plan) -> Iterable[Case]:
    if _EXTEND in plan.modes:
        for queries, prefix in (((1, 2, 9), (0, 0, 0)), ((4, 4), (4, 31)), ((17,), (3,)), ((1, 33), (64, 1))):
            yield plan.case("A", "causal", _EXTEND, queries=queries, prefix=prefix)
    if _DECODE in plan.modes:
        yield plan.case("A", "causal", _DECODE, queries=(1,) * 6, prefix=(0, 1, 14, 15, 16, 17))


def _uncached(plan: Plan) -> Iterable[Case]:
    """Attention that is not causal: bidirectional, encoder-only, cross, and blocks of a diffusion model."""
    bidir = plan.layer(attn=AttentionType.DECODER_BIDIRECTIONAL)
    encoder = plan.layer(attn=AttentionType.ENCODER_ONLY)
    for mode in (_EXTEND, _DECODE):
        if mode not in plan.modes:
            continue
        if plan.has(Feature.BIDIRECTIONAL):
            yield plan.case("A", "bidirectional", mode, bidir)
            if plan.has(Feature.SLIDING_WINDOW):
                for w in (0, 4, 20):
                    yield plan.case("A", "bidirectional", mode, plan.layer(attn=bidir.attn, window=w))
        if plan.has(Feature.CROSS_ATTENTION):
            batch = len(plan.case("A", "cross", mode).queries)
            layers = (plan.layer(), plan.layer(cross=True))
            yield plan.case("A", "cross", mode, layers=layers, encoder=(9, 1, 37, 20)[:batch])
    if plan.has(Feature.ENCODER_ONLY, Feature.SINKS) and _EXTEND in plan.modes:
        layer = plan.layer(heads=3 * plan.groups[0], kv_heads=3, attn=encoder.attn, sinks=True)
        yield plan.case("A", "encoder_only", _EXTEND, layer, queries=(1, 9, 33), prefix=(0, 0, 0))
    if plan.has(Feature.ENCODER_ONLY) and _EXTEND in plan.modes:
        yield plan.case("A", "encoder_only", _EXTEND, encoder, queries=(1, 9, 33), prefix=(0, 0, 0))
        if plan.has(Feature.SLIDING_WINDOW):
            layer = plan.layer(attn=encoder.attn, window=5)
            yield plan.case("A", "encoder_only", _EXTEND, layer, queries=(1, 9, 33), prefix=(0, 0, 0))
    if ForwardMode.DLLM_EXTEND in plan.modes:
        yield plan.case("A", "block", ForwardMode.DLLM_EXTEND, queries=(8, 8, 8), prefix=(0, 8, 40))


def mla_cases(plan: Plan, axis: str, check: str, **changes: Any) -> Iterator[Case]:
    """Yield every declared form of MLA in the modes that it serves."""
    latent, rope = choose(LATENTS, plan.spec.kv_lora_ranks)[0], choose(ROPES, plan.spec.rope_head_dims)[0]
    shared: dict[str, Any] = {"kind": Kind.MLA, "latent": latent, "rope": rope, "kv_heads": 4}
    # Expanded heads: the usual 128 + 64 and 128 where declared.
    width = 192 if 192 in plan.spec.head_dims else choose(HEAD_DIMS, plan.spec.head_dims)[0]
    value = 128 if 128 in plan.spec.v_head_dims else choose(HEAD_DIMS, plan.spec.v_head_dims)[0]
    layer = LayerCase(heads=4, dim=width, v_dim=value, scaling=0.06, **shared)
    for form in MlaForm:
        if not plan.has(Feature(f"mla_{form.value}")):
            continue
        for mode in plan.modes:
            if form is not MlaForm.ABSORBED and mode is not _EXTEND:
                continue
            if mode is ForwardMode.TARGET_VERIFY and not plan.has(Feature.CHAIN_VERIFY):
                continue
            lse = form is MlaForm.CHUNKED_PREFIX and plan.has(Feature.LSE)
            # The second request has no prefix, and with that no row of the chunk.
            prefix: dict[str, Any] = {"prefix": (3, 0, 40)} if form is MlaForm.CHUNKED_PREFIX else {}
            fields: dict[str, Any] = {
                "mla": form.value,
                "lse": lse,
                "save": form is not MlaForm.CHUNKED_PREFIX,
                **prefix,
                **changes,
            }
            yield plan.case(axis, check, mode, layer, **fields)


AXIS = Axis(
    "A",
    "semantics",
    _cases,
    {
        "window_edge": oracle_check("a window of w shows a query at p the keys p-w … p, w+1 of them"),
        "soft_cap": oracle_check("scores are scaled, then capped by cap·tanh(s/cap), then masked"),
        "sinks": oracle_check("a sink joins the softmax's denominator, once, and has no value"),
        "scaling": oracle_check("scores are q·k · layer.scaling, whatever the head dimension"),
        "combined": oracle_check("window, soft cap and sinks hold together: scale, cap, mask, sink"),
        "gqa": oracle_check("query head h reads KV head h // group"),
        "head_dim": oracle_check("each declared head dimension is computed whole"),
        "v_head_dim": oracle_check("value heads may be of another width than query heads"),
        "causal": oracle_check("causality is bottom-right: the last query sees every key"),
        "bidirectional": oracle_check("without causality every key is visible, and a window is |p - k| ≤ w"),
        "cross": oracle_check("cross attention reads the encoder's space, without causality"),
        "encoder_only": oracle_check("encoder-only attention is over the rows of the batch, and no pool is touched"),
        "block": oracle_check("a diffusion block is bidirectional inside, after its cached prefix"),
        "mla": oracle_check("latent attention: absorbed over the pool's rows, or expanded over given heads"),
    },
)
