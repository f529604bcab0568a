"""Whether a spec fits a request: a pure function that returns every reason against it at once."""

from __future__ import annotations

from collections.abc import Iterable

from .admission import layer_reasons, words
from .errors import Reason
from .model_spec import LayerSpec
from .request import Request, Role
from .spec import BackendSpec, Feature, Kind


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
    _check_layers(spec, request.layers, reasons)
    return tuple(reasons)


def _check_device(spec: BackendSpec, request: Request, reasons: list[Reason]) -> None:
    device = request.device
    if device.type not in spec.device_types:
        reasons.append(Reason("device_types", device.type, words(spec.device_types)))
    elif device.compute_capability is not None:
        low, high = spec.compute_capability
        capability = device.compute_capability
        if (low is not None and capability < low) or (high is not None and capability > high):
            supported = f"sm_{low or 0} … " + (f"sm_{high}" if high is not None else "newest")
            reasons.append(Reason("compute_capability", f"sm_{capability}", supported))


def _check_batch(spec: BackendSpec, request: Request, reasons: list[Reason]) -> None:
    if request.dtype is not None and request.dtype not in spec.dtypes:
        reasons.append(Reason("dtypes", request.dtype, words(spec.dtypes)))
    if request.role is not Role.LINEAR:
        if request.kv_dtype is not None and request.kv_dtype not in spec.kv_dtypes:
            reasons.append(Reason("kv_dtypes", request.kv_dtype, words(spec.kv_dtypes)))
        if request.page_size is not None and request.page_size not in spec.page_sizes:
            reasons.append(Reason("page_sizes", str(request.page_size), str(spec.page_sizes)))
    longest = request.max_context_len
    if longest is not None and spec.max_context_len is not None and longest > spec.max_context_len:
        reasons.append(Reason("max_context_len", str(longest), f"≤ {spec.max_context_len}"))


def _check_features(spec: BackendSpec, request: Request, reasons: list[Reason]) -> None:
    asked = {feature: "the deployment" for feature in request.features}
    shapes = {(one.num_heads, one.num_kv_heads, one.head_dim, one.v_head_dim) for one in request.layers}
    if request.role is not Role.LINEAR:
        if len(shapes) > 1:
            asked[Feature.HETEROGENEOUS_LAYERS] = f"{len(shapes)} shapes of heads"
        if (request.kv_dtype or "").startswith("float8"):
            asked[Feature.FP8_KV] = f"a pool of {request.kv_dtype}"
    for feature in sorted(asked, key=lambda one: one.value):
        if feature not in spec.features:
            reasons.append(Reason(feature.value, asked[feature], f"not declared; features: {words(spec.features)}"))
    if any(layer.kind is Kind.MLA for layer in request.layers) and not _mla_form(spec, request.role):
        absorbed = request.role not in (Role.PREFILL, Role.DRAFT_PREFILL)
        form = "mla_absorbed" if absorbed else "mla_absorbed, or mla_one_shot with mla_chunked_prefix and lse"
        reasons.append(Reason("mla_forms", form, words(spec.features)))


def _mla_form(spec: BackendSpec, role: Role) -> bool:
    """Whether a backend has the forms of latent attention that a role needs."""
    if Feature.MLA_ABSORBED in spec.features:
        return True
    # Decoding over expanded heads would gather the whole prefix for each token: only prefill may use them, and what a
    # prefix and the new tokens give is merged by LSE.
    expanded = {Feature.MLA_ONE_SHOT, Feature.MLA_CHUNKED_PREFIX, Feature.LSE}
    return role in (Role.PREFILL, Role.DRAFT_PREFILL) and expanded <= spec.features


def _check_layers(spec: BackendSpec, layers: Iterable[LayerSpec], reasons: list[Reason]) -> None:
    """Add the reasons that layers give, each once, with the layers that give it."""
    asking: dict[Reason, list[int]] = {}
    for layer in layers:
        at = f"layer {layer.layer_id}"
        for reason in layer_reasons(spec, layer):
            if reason.field != "mla_forms":  # Which forms are needed depends on the role: checked above.
                plain = reason.asked.replace(f" ({at})", "").replace(at, "it")
                asking.setdefault(reason._replace(asked=plain), []).append(layer.layer_id)
    reasons.extend(reason._replace(asked=f"{reason.asked} {_where(ids)}") for reason, ids in asking.items())


def _need(reasons: list[Reason], name: str, asked: Iterable[object], supported: Iterable[object]) -> None:
    lacking = set(asked) - set(supported)
    if lacking:
        reasons.append(Reason(name, words(lacking), words(supported)))


def _where(layer_ids: list[int]) -> str:
    """Say which layers ask: a model of eighty has them said in a few words."""
    few = ", ".join(map(str, sorted(layer_ids)[:4]))
    more = f" and {len(layer_ids) - 4} more" if len(layer_ids) > 4 else ""
    return f"(layer {few})" if len(layer_ids) == 1 else f"(layers {few}{more})"
