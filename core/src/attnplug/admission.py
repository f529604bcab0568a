"""Whether a backend's declaration covers a layer: every reason against it, standard library only.

``select`` asks before weights load; ``AttentionBackend`` asks again when it first sees a layer, so that a backend which
was built by hand refuses as one that was resolved would.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


def env_reasons(
    spec: BackendSpec,
    *,
    device_type: str,
    dtype: str,
    kv_dtype: str,
    kv_layout: str,
    page_size: int,
    max_context_len: int,
    deterministic: bool,
    layers: Sequence[LayerSpec],
) -> list[Reason]:
    """Return every reason why a backend may not be built for an environment.

    Args:
        spec: What was declared.
        device_type: torch's device type.
        dtype: torch's name of the activations' dtype.
        kv_dtype: The pool's dtype; like layout and page size, only asked where a layer of the backend's reads a pool.
        kv_layout: 'NHD' or 'HND'.
        page_size: Tokens a page.
        max_context_len: The longest context that the environment allows.
        deterministic: Whether batch-invariant results are asked for.
        layers: The model's; those of other kinds are other backends' to serve.
    """
    reasons = []
    if device_type not in spec.device_types:
        reasons.append(Reason("device_types", device_type, words(spec.device_types)))
    if dtype not in spec.dtypes:
        reasons.append(Reason("dtypes", dtype, words(spec.dtypes)))
    served = [layer for layer in layers if layer.kind in spec.kinds and layer.kind is not Kind.LINEAR]
    if any(layer.reads_pool for layer in served):
        if kv_dtype not in spec.kv_dtypes:
            reasons.append(Reason("kv_dtypes", kv_dtype, words(spec.kv_dtypes)))
        if kv_layout not in spec.kv_layouts:
            reasons.append(Reason("kv_layouts", kv_layout, words(spec.kv_layouts)))
        reasons += _dim("page_sizes", page_size, spec.page_sizes)
    if spec.max_context_len is not None and max_context_len > spec.max_context_len:
        reasons.append(Reason("max_context_len", str(max_context_len), f"at most {spec.max_context_len}"))
    if deterministic:
        reasons += _wants(spec, Feature.DETERMINISTIC, "batch-invariant results")
    shapes = {(one.num_heads, one.num_kv_heads, one.head_dim, one.v_head_dim) for one in served}
    if len(shapes) > 1:
        reasons += _wants(spec, Feature.HETEROGENEOUS_LAYERS, f"layers of {len(shapes)} shapes")
    return reasons
