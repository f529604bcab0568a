"""What a layer's call must bring, beyond what the spec refuses: checked before any kernel, all faults at once."""

from __future__ import annotations

from torch import Tensor

from attnplug.attention_io import AttentionExtras
from attnplug.errors import BackendRejected, Reason
from attnplug.layer import AttentionLayer
from attnplug.modes import AttentionType, MlaForm


def check_call(
    name: str, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, save_kv_cache: bool
) -> None:
    """Refuse a softmax layer's call that cannot be answered.

    Raises:
        BackendRejected: With every reason.
    """
    reasons = _shape("q", q, layer.num_heads, layer.head_dim)
    if (k is None) != (v is None):
        reasons.append(Reason("k, v", f"only {'k' if v is None else 'v'}", "both, or neither where they are cached"))
    if k is not None:
        reasons += _shape("k", k, layer.num_kv_heads, layer.head_dim)
    if v is not None:
        reasons += _shape("v", v, layer.num_kv_heads, layer.v_head_dim)
    if layer.is_cross_attention and layer.sliding_window_size >= 0:
        asked = f"{layer.sliding_window_size} in cross attention"
        reasons.append(Reason("sliding_window_size", asked, "-1: encoder positions have no distance to a query"))
    if layer.is_cross_attention and k is not None and not save_kv_cache:
        reasons.append(Reason("save_kv_cache", "False with encoder keys", "True, or no k and v: the pool's are read"))
    if layer.attn_type is AttentionType.ENCODER_ONLY and k is None:
        reasons.append(Reason("k, v", "None", "the batch's own rows: an encoder's keys are not cached"))
    if not layer.is_cross_attention and k is not None and k.shape[0] != q.shape[0]:
        reasons.append(Reason("k, v", f"{k.shape[0]} rows", f"as many as q, {q.shape[0]}"))
    _refuse(name, layer, reasons)


def check_mla(
    name: str, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, extras: AttentionExtras
) -> None:
    """Refuse an MLA layer's call that cannot be answered.

    Raises:
        BackendRejected: With every reason.
    """
    reasons = []
    form = extras.mla_form
    if form is None:
        reasons.append(Reason("extras.mla_form", "None", ", ".join(f.value for f in MlaForm)))
    if (extras.latent is None) != (extras.k_rope is None):
        reasons.append(Reason("extras.latent, extras.k_rope", "one of them", "both, or neither"))
    if form is MlaForm.ABSORBED:
        for field, x, width in (
            ("q_nope", extras.q_nope, layer.kv_lora_rank),
            ("q_rope", extras.q_rope, layer.qk_rope_head_dim),
        ):
            if x is None:
                reasons.append(Reason(f"extras.{field}", "None", f"[T, {layer.num_heads}, {width}]"))
            else:
                reasons += _shape(f"extras.{field}", x, layer.num_heads, width)
    elif form is not None:
        if k is None or v is None:
            reasons.append(Reason("k, v", "None", f"expanded heads: {form.value} reads no pool"))
        if form is MlaForm.CHUNKED_PREFIX and extras.chunk_indptr is None:
            reasons.append(Reason("extras.chunk_indptr", "None", "[B + 1] int64 on the device: the chunk's rows"))
        if form is MlaForm.ONE_SHOT and k is not None and k.shape[0] != q.shape[0]:
            reasons.append(Reason("k, v", f"{k.shape[0]} rows", f"as many as q, {q.shape[0]}"))
    _refuse(name, layer, reasons)


def _shape(name: str, x: Tensor, heads: int, width: int) -> list[Reason]:
    shape = x.shape
    if len(shape) == 3 and shape[1] == heads and shape[2] == width:
        return []
    return [Reason(name, str(tuple(shape)), f"[rows, {heads}, {width}]")]


def _refuse(name: str, layer: AttentionLayer, reasons: list[Reason]) -> None:
    if reasons:
        raise BackendRejected(
            f"backend {name!r} cannot run this call of layer {layer.layer_id}",
            reasons={name: reasons},
            remedy="give the layer's call what the contract names",
        )
