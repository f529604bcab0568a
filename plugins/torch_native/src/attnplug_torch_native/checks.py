"""What a layer's call must bring, beyond what the spec refuses: checked before any kernel, all faults at once."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug.attention_io import AttentionExtras
from attnplug.errors import BackendRejected, Reason
from attnplug.layer import AttentionLayer
from attnplug.model_spec import LayerSpec
from attnplug.modes import AttentionType, ForwardMode, MlaForm


def is_causal(layer: AttentionLayer | LayerSpec, mode: ForwardMode) -> bool:
    """Whether a query's position bounds its keys in a step of a mode."""
    decoding = layer.attn_type is AttentionType.DECODER and not layer.is_cross_attention
    return decoding and mode is not ForwardMode.DLLM_EXTEND


def compute_dtype(q: torch.dtype, stored: torch.dtype) -> torch.dtype:
    """Return the dtype that holds both queries and stored keys exactly; every fp8 value is exact in the half types."""
    return q if stored.itemsize == 1 else torch.promote_types(q, stored)


def check_call(
    name: str, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, save_kv_cache: bool
) -> None:
    """Refuse a softmax layer's call that cannot be answered.

    Raises:
        BackendRejected: With every reason.
    """
    reasons = _shape("q", q, (layer.num_heads, layer.head_dim))
    if (k is None) != (v is None):
        given = "k" if v is None else "v"
        reasons.append(Reason("k, v", f"only {given}", "both, or neither where they are in the pool"))
    if k is not None:
        reasons += _shape("k", k, (layer.num_kv_heads, layer.head_dim))
    if v is not None:
        reasons += _shape("v", v, (layer.num_kv_heads, layer.v_head_dim))
    if layer.is_cross_attention and layer.sliding_window_size >= 0:
        asked = f"{layer.sliding_window_size} in cross attention (layer {layer.layer_id})"
        reasons.append(Reason("sliding_window_size", asked, "-1: encoder positions have no distance to a query"))
    if layer.is_cross_attention and k is not None and not save_kv_cache:
        asked = f"encoder keys without a write (layer {layer.layer_id})"
        reasons.append(Reason("save_kv_cache", asked, "write them, or give no k and v and reuse what the pool holds"))
    if layer.attn_type is AttentionType.ENCODER_ONLY and k is None:
        reasons.append(Reason("k, v", f"None (layer {layer.layer_id})", "the batch's own rows: nothing is cached"))
    if layer.attn_type is AttentionType.ENCODER_ONLY and k is not None and k.shape[0] != q.shape[0]:
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
        wanted = {"q_nope": (layer.num_heads, layer.kv_lora_rank), "q_rope": (layer.num_heads, layer.qk_rope_head_dim)}
        for field, shape in wanted.items():
            value = getattr(extras, field)
            if value is None:
                reasons.append(Reason(f"extras.{field}", "None", f"[T, {shape[0]}, {shape[1]}]"))
            else:
                reasons += _shape(f"extras.{field}", value, shape)
    elif form is not None:
        if k is None or v is None:
            reasons.append(Reason("k, v", "None", f"expanded heads: {form.value} reads no pool"))
        if form is MlaForm.CHUNKED_PREFIX and extras.chunk_lens_cpu is None:
            reasons.append(Reason("extras.chunk_lens_cpu", "None", "the chunk's lengths, one a request"))
        if form is MlaForm.CHUNKED_PREFIX and k is not None and sum(extras.chunk_lens_cpu or ()) > k.shape[0]:
            asked = f"{sum(extras.chunk_lens_cpu or ())} rows"
            reasons.append(Reason("extras.chunk_lens_cpu", asked, f"at most k's {k.shape[0]}"))
        if form is MlaForm.ONE_SHOT and k is not None and k.shape[0] != q.shape[0]:
            reasons.append(Reason("k, v", f"{k.shape[0]} rows", f"as many as q, {q.shape[0]}"))
    _refuse(name, layer, reasons)


def _shape(name: str, x: Tensor, tail: tuple[int, int]) -> list[Reason]:
    if x.dim() == 3 and tuple(x.shape[1:]) == tail:
        return []
    return [Reason(name, str(tuple(x.shape)), f"[rows, {tail[0]}, {tail[1]}]")]


def _refuse(name: str, layer: AttentionLayer, reasons: list[Reason]) -> None:
    if reasons:
        raise BackendRejected(
            f"backend {name!r} cannot run this call of layer {layer.layer_id}",
            reasons={name: reasons},
            remedy="give the layer's call what the contract names",
        )
