"""Whether a backend's declaration covers a layer: every reason against it, standard library only.

``select`` asks before weights load; ``AttentionBackend`` asks again when it first sees a layer, so that a backend which
was built by hand refuses as one that was resolved would.
"""

from __future__ import annotations

from collections.abc import Iterable

from .errors import Reason
from .model_spec import LayerSpec
from .modes import AttentionType
from .spec import BackendSpec, Dims, Feature, Kind

_MLA_FEATURES = (Feature.MLA_ABSORBED, Feature.MLA_ONE_SHOT, Feature.MLA_CHUNKED_PREFIX)


def words(values: Iterable[object]) -> str:
    """Return enum members or strings as one sorted, readable list; 'none' where it is empty."""
    return ", ".join(sorted(str(getattr(v, "value", v)) for v in values)) or "none"


def _wants(spec: BackendSpec, feature: Feature, asked: str) -> list[Reason]:
    if feature in spec.features:
        return []
    return [Reason(feature.value, asked, f"not declared; features: {words(spec.features)}")]


def _dim(name: str, asked: int, allowed: Dims) -> list[Reason]:
    return [] if asked in allowed else [Reason(name, str(asked), str(allowed))]


def layer_reasons(spec: BackendSpec, layer: LayerSpec) -> list[Reason]:
    """Return every reason why a backend may not serve a layer, each as (field, asked, supported)."""
    reasons: list[Reason] = []
    at = f"layer {layer.layer_id}"
    if layer.kind not in spec.kinds:
        reasons.append(Reason("kinds", f"{layer.kind.value} ({at})", words(spec.kinds)))
    if layer.kind is Kind.LINEAR:
        if layer.linear_family not in spec.linear_families:
            reasons.append(Reason("linear_families", f"{layer.linear_family} ({at})", words(spec.linear_families)))
        return reasons
    if layer.kind is Kind.MLA:
        reasons += _dim("kv_lora_ranks", layer.kv_lora_rank, spec.kv_lora_ranks)
        reasons += _dim("rope_head_dims", layer.qk_rope_head_dim, spec.rope_head_dims)
        if not any(form in spec.features for form in _MLA_FEATURES):
            reasons.append(Reason("mla_forms", f"any of {words(_MLA_FEATURES)} ({at})", words(spec.features)))
    else:
        reasons += _dim("head_dims", layer.head_dim, spec.head_dims)
        reasons += _dim("v_head_dims", layer.v_head_dim, spec.v_head_dims)
        if layer.num_kv_heads < 1 or layer.num_heads % layer.num_kv_heads:
            asked = f"{layer.num_heads} query heads over {layer.num_kv_heads} ({at})"
            reasons.append(Reason("num_kv_heads", asked, "a divisor of the query heads"))
        else:
            reasons += _dim("group_sizes", layer.group_size, spec.group_sizes)
        if layer.v_head_dim != layer.head_dim:
            reasons += _wants(spec, Feature.V_HEAD_DIM, f"{layer.v_head_dim} beside head_dim {layer.head_dim} ({at})")
    if layer.sliding_window_size >= 0:
        reasons += _wants(spec, Feature.SLIDING_WINDOW, f"{layer.sliding_window_size} ({at})")
    if layer.logit_cap:
        reasons += _wants(spec, Feature.SOFTCAP, f"{layer.logit_cap} ({at})")
    if layer.has_sinks:
        reasons += _wants(spec, Feature.SINKS, f"sinks ({at})")
    if layer.has_kv_scales:
        reasons += _wants(spec, Feature.KV_SCALES, f"k_scale or v_scale other than 1 ({at})")
    if layer.is_cross_attention:
        reasons += _wants(spec, Feature.CROSS_ATTENTION, at)
    if layer.attn_type is AttentionType.ENCODER_ONLY:
        reasons += _wants(spec, Feature.ENCODER_ONLY, at)
    if layer.attn_type is AttentionType.DECODER_BIDIRECTIONAL:
        reasons += _wants(spec, Feature.BIDIRECTIONAL, at)
    return reasons
