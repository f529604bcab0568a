"""Whether a spec fits a request: a pure function that returns every reason against it at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

from .errors import Reason
from .model_spec import LayerSpec
from .modes import AttentionType
from .request import Request, Role
from .spec import BackendSpec, Dims, Feature, Kind


def verdict(spec: BackendSpec, request: Request) -> tuple[Reason, ...]:
    """Return every reason why a backend cannot serve a request; empty where it can.

    A field that the request leaves open (no model, no page size) is not checked.
    """
    reasons: list[Reason] = []
    _check_device(spec, request, reasons)
    _need(reasons, "phases", request.phases, spec.phases)
    _need(reasons, "modes", request.modes, spec.modes)
    _check_batch(spec, request, reasons)
    if spec.graph_level < request.graph_level:
        reasons.append(Reason("graph_level", request.graph_level.name, spec.graph_level.name))
    _check_features(spec, request, reasons)
    _need(reasons, "kinds", {layer.kind for layer in request.layers}, spec.kinds)
    families = {layer.linear_family for layer in request.layers if layer.kind is Kind.LINEAR}
    _need(reasons, "linear_families", families, spec.linear_families)
    _check_dims(spec, request.layers, reasons)
    return tuple(reasons)


def layer_features(layer: LayerSpec) -> frozenset[Feature]:
    """Return what a layer asks beyond plain causal attention."""
    asked = {
        Feature.SLIDING_WINDOW: layer.sliding_window_size >= 0,
        Feature.SOFTCAP: layer.logit_cap > 0,
        Feature.SINKS: layer.has_sinks,
        Feature.KV_SCALES: layer.has_kv_scales,
        Feature.CROSS_ATTENTION: layer.is_cross_attention,
        Feature.ENCODER_ONLY: layer.attn_type is AttentionType.ENCODER_ONLY,
        Feature.BIDIRECTIONAL: layer.attn_type is AttentionType.DECODER_BIDIRECTIONAL,
        # The latent form has its own widths, which kv_lora_ranks and rope_head_dims bound.
        Feature.V_HEAD_DIM: layer.kind is Kind.SOFTMAX and layer.v_head_dim != layer.head_dim,
    }
    return frozenset(feature for feature, present in asked.items() if present)


def _check_device(spec: BackendSpec, request: Request, reasons: list[Reason]) -> None:
    device = request.device
    if device.type not in spec.device_types:
        reasons.append(Reason("device_types", device.type, _words(spec.device_types)))
    elif device.compute_capability is not None:
        low, high = spec.compute_capability
        capability = device.compute_capability
        if (low is not None and capability < low) or (high is not None and capability > high):
            supported = f"sm_{low or 0} … " + (f"sm_{high}" if high is not None else "newest")
            reasons.append(Reason("compute_capability", f"sm_{capability}", supported))


def _check_batch(spec: BackendSpec, request: Request, reasons: list[Reason]) -> None:
    if request.dtype is not None and request.dtype not in spec.dtypes:
        reasons.append(Reason("dtypes", request.dtype, _words(spec.dtypes)))
    if request.role is not Role.LINEAR:
        if request.kv_dtype is not None and request.kv_dtype not in spec.kv_dtypes:
            reasons.append(Reason("kv_dtypes", request.kv_dtype, _words(spec.kv_dtypes)))
        if request.page_size is not None and request.page_size not in spec.page_sizes:
            reasons.append(Reason("page_sizes", str(request.page_size), str(spec.page_sizes)))
    longest = request.max_context_len
    if longest is not None and spec.max_context_len is not None and longest > spec.max_context_len:
        reasons.append(Reason("max_context_len", str(longest), f"≤ {spec.max_context_len}"))


def _check_features(spec: BackendSpec, request: Request, reasons: list[Reason]) -> None:
    asked: dict[Feature, list[LayerSpec]] = {feature: [] for feature in request.features}
    for layer in request.layers:
        for feature in layer_features(layer):
            asked.setdefault(feature, []).append(layer)
    shapes = {(one.num_heads, one.num_kv_heads, one.head_dim, one.v_head_dim) for one in request.layers}
    if len(shapes) > 1 and request.role is not Role.LINEAR:
        asked[Feature.HETEROGENEOUS_LAYERS] = []
    if (request.kv_dtype or "").startswith("float8") and request.role is not Role.LINEAR:
        asked[Feature.FP8_KV] = []
    for feature in sorted(asked, key=lambda one: one.value):
        if feature not in spec.features:
            where = _where(asked[feature])
            reasons.append(Reason("features", feature.value + where, _words(spec.features)))
    if any(layer.kind is Kind.MLA for layer in request.layers) and not _mla_form(spec, request.role):
        absorbed = request.role not in (Role.PREFILL, Role.DRAFT_PREFILL)
        form = "mla_absorbed" if absorbed else "mla_absorbed, or mla_one_shot with mla_chunked_prefix"
        reasons.append(Reason("features", form, _words(spec.features)))


def _mla_form(spec: BackendSpec, role: Role) -> bool:
    """Whether a backend has the forms of latent attention that a role needs."""
    if Feature.MLA_ABSORBED in spec.features:
        return True
    # Decoding over expanded heads would gather the whole prefix for each token: only prefill may use them.
    expanded = {Feature.MLA_ONE_SHOT, Feature.MLA_CHUNKED_PREFIX}
    return role in (Role.PREFILL, Role.DRAFT_PREFILL) and expanded <= spec.features


def _check_dims(spec: BackendSpec, layers: Iterable[LayerSpec], reasons: list[Reason]) -> None:
    layers = tuple(layers)
    expanded = [one for one in layers if one.kind in (Kind.SOFTMAX, Kind.SPARSE)]
    latent = [one for one in layers if one.kind is Kind.MLA]
    if Feature.MLA_ABSORBED not in spec.features:
        expanded += latent
    checks: tuple[tuple[str, Dims, Iterable[LayerSpec], Callable[[LayerSpec], int]], ...] = (
        ("head_dims", spec.head_dims, expanded, lambda one: one.head_dim),
        ("v_head_dims", spec.v_head_dims, expanded, lambda one: one.v_head_dim),
        ("group_sizes", spec.group_sizes, [one for one in expanded if one.kind is not Kind.MLA], _group_size),
        ("kv_lora_ranks", spec.kv_lora_ranks, latent, lambda one: one.kv_lora_rank),
        ("rope_head_dims", spec.rope_head_dims, latent, lambda one: one.qk_rope_head_dim),
    )
    for name, dims, asking, read in checks:
        outside: dict[int, list[LayerSpec]] = {}
        for layer in asking:
            if read(layer) not in dims:
                outside.setdefault(read(layer), []).append(layer)
        for value in sorted(outside):
            reasons.append(Reason(name, f"{value}{_where(outside[value])}", str(dims)))


def _group_size(layer: LayerSpec) -> int:
    return layer.group_size


def _need(reasons: list[Reason], name: str, asked: Iterable[object], supported: Iterable[object]) -> None:
    lacking = set(asked) - set(supported)
    if lacking:
        reasons.append(Reason(name, _words(lacking), _words(supported)))


def _words(values: Iterable[object]) -> str:
    words = sorted(value.value if isinstance(value, Enum) else str(value) for value in values)
    return ", ".join(words) or "none"


def _where(layers: list[LayerSpec]) -> str:
    """Say which layers ask: a model of eighty has them said in a few words."""
    if not layers:
        return ""
    ids = sorted(layer.layer_id for layer in layers)
    few = ", ".join(map(str, ids[:4]))
    return f" (layer {few})" if len(ids) == 1 else f" (layers {few}{f' and {len(ids) - 4} more' * (len(ids) > 4)})"
