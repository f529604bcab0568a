"""Which parts of a declaration a case is about, so that a report can say of each whether it was proven."""

from __future__ import annotations

from collections.abc import Iterator

from ..modes import AttentionType
from ..spec import BackendSpec, Feature, Kind
from .case import Case, LayerCase


def topics_of(case: Case) -> tuple[str, ...]:
    """Return what a case proves where it passes, as 'modes.decode' and 'features.sinks'; sorted."""
    return tuple(sorted(set(_topics(case))))


def _topics(case: Case) -> Iterator[str]:
    yield f"modes.{case.mode.value}"
    yield f"dtypes.{case.dtype}"
    yield f"kv_dtypes.{case.pool_dtype}"
    yield f"kv_layouts.{case.layout}"
    yield f"page_sizes.{case.page}"
    if case.mode.is_target_verify:
        yield f"features.{(Feature.CUSTOM_MASK if case.mask else Feature.CHAIN_VERIFY).value}"
    if case.pool_dtype.startswith("float8"):
        yield f"features.{Feature.FP8_KV.value}"
    if case.lse:
        yield f"features.{Feature.LSE.value}"
    if case.mla:
        yield f"features.mla_{case.mla}"
    if case.check == "batch_invariance":
        yield f"features.{Feature.DETERMINISTIC.value}"
    if len({(layer.heads, layer.kv_heads, layer.dim, layer.value_dim) for layer in case.layers}) > 1:
        yield f"features.{Feature.HETEROGENEOUS_LAYERS.value}"
    if case.wrap:
        yield f"wrappers.{case.wrap}"
    for layer in case.layers:
        yield f"kinds.{layer.kind.value}"
        yield from _layer_topics(layer)


def _layer_topics(layer: LayerCase) -> Iterator[str]:
    features = {
        Feature.SLIDING_WINDOW: layer.window >= 0,
        Feature.SINKS: layer.sinks,
        Feature.SOFTCAP: layer.cap > 0,
        Feature.KV_SCALES: layer.k_scale != 1.0 or layer.v_scale != 1.0,
        Feature.CROSS_ATTENTION: layer.cross,
        Feature.ENCODER_ONLY: layer.attn is AttentionType.ENCODER_ONLY,
        Feature.BIDIRECTIONAL: layer.attn is AttentionType.DECODER_BIDIRECTIONAL,
        Feature.V_HEAD_DIM: layer.kind is Kind.SOFTMAX and layer.value_dim != layer.dim,
    }
    yield from (f"features.{feature.value}" for feature, has in features.items() if has)


def declared_topics(spec: BackendSpec) -> tuple[str, ...]:
    """Return every word of a declaration that must be proven; sorted."""
    words = [f"features.{one.value}" for one in spec.features]
    words += [f"modes.{one.value}" for one in spec.modes]
    words += [f"kinds.{one.value}" for one in spec.kinds]
    words += [f"dtypes.{one}" for one in spec.dtypes]
    words += [f"kv_dtypes.{one}" for one in spec.kv_dtypes]
    words += [f"kv_layouts.{one}" for one in spec.kv_layouts]
    words += [f"page_sizes.{one}" for one in spec.page_sizes.values]
    return tuple(sorted(words))
