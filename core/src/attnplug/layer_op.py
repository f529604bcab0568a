"""The attention layer's call as one opaque operation, so that a compiled model passes through it unseen.

Eager calls do not come here. Under ``torch.compile`` a layer calls ``attnplug::attention`` with tensors and a number;
when the compiled code runs, the number finds the layer and the ``ForwardContext`` the backend and the batch. What the
call writes to the KV pool is hidden from the compiler, and so is what it reads there: every call also writes one token
tensor of its device, which keeps calls in order and none from being dropped.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .attention_io import AttentionExtras, AttentionOutput
from .context import get_forward_context
from .errors import ContractViolation
from .modes import MlaForm

if TYPE_CHECKING:
    from .layer import AttentionLayer

_layers: WeakValueDictionary[int, AttentionLayer] = WeakValueDictionary()
_numbers = count()
_order: dict[str, Tensor] = {}

_TENSOR_FIELDS = tuple(one.name for one in fields(AttentionExtras) if one.type == "Tensor | None")


def number_layer(layer: AttentionLayer) -> int:
    """Return a new number by which compiled code of this process finds a layer."""
    number = next(_numbers)
    _layers[number] = layer
    return number


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _order_token(device: str) -> Tensor:
    """Return the token of a device; runs while compiling, and compiled code holds what it returned."""
    token = _order.get(device)
    if token is None:
        with torch.inference_mode(False):
            token = _order[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return token


def _run(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    tensors: list[Tensor | None],
    layer_number: int,
    save_kv_cache: bool,
    return_lse: bool,
    mla_form: str,
    chunk_lens: list[int] | None,
) -> AttentionOutput:
    layer = _layers.get(layer_number)
    if layer is None:
        raise ContractViolation(
            f"compiled code calls attention layer number {layer_number}, which this process no longer has",
            remedy="compile the model again after its layers were replaced",
        )
    context = get_forward_context()
    if context.batch is None:
        raise ContractViolation(
            "a compiled model called an attention layer, and the forward context names no batch",
            remedy="publish it: `with forward_context(ForwardContext(backend, batch=batch)):`",
        )
    extras = None
    if return_lse or mla_form or any(t is not None for t in tensors):
        extras = AttentionExtras(
            return_lse=return_lse,
            mla_form=MlaForm(mla_form) if mla_form else None,
            chunk_lens_cpu=None if chunk_lens is None else tuple(chunk_lens),
            **dict(zip(_TENSOR_FIELDS, tensors, strict=True)),
        )
    return context.attn_backend.forward(q, k, v, layer, context.batch, save_kv_cache, extras)


def _width(layer_number: int, mla_form: str) -> tuple[int, int]:
    layer = _layers[layer_number]
    return layer.num_heads, layer.kv_lora_rank if mla_form == MlaForm.ABSORBED.value else layer.v_head_dim


def _dtype(q: Tensor, v: Tensor | None) -> torch.dtype:
    source = q if v is None else v
    return torch.bfloat16 if source.dtype.itemsize == 1 else source.dtype


_ARGUMENTS = (
    "Tensor(a!) order, Tensor q, Tensor? k, Tensor? v, Tensor?[] extras, int layer_number, bool save_kv_cache, "
    "str mla_form, int[]? chunk_lens"
)


@torch.library.custom_op("attnplug::attention", mutates_args={"order"}, schema=f"({_ARGUMENTS}) -> Tensor")
def _attention(
    order: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    extras: list[Tensor | None],
    layer_number: int,
    save_kv_cache: bool,
    mla_form: str,
    chunk_lens: list[int] | None,
) -> Tensor:
    out = _run(q, k, v, extras, layer_number, save_kv_cache, False, mla_form, chunk_lens).out
    # An operation's result may not alias what went in.
    return out if _owns(out, q, k, v) else out.clone()


@_attention.register_fake
def _(
    order: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    extras: list[Tensor | None],
    layer_number: int,
    save_kv_cache: bool,
    mla_form: str,
    chunk_lens: list[int] | None,
) -> Tensor:
    return q.new_empty((q.shape[0], *_width(layer_number, mla_form)), dtype=_dtype(q, v))


@torch.library.custom_op(
    "attnplug::attention_with_lse", mutates_args={"order"}, schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)"
)
def _attention_with_lse(
    order: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    extras: list[Tensor | None],
    layer_number: int,
    save_kv_cache: bool,
    mla_form: str,
    chunk_lens: list[int] | None,
) -> tuple[Tensor, Tensor]:
    result = _run(q, k, v, extras, layer_number, save_kv_cache, True, mla_form, chunk_lens)
    if result.lse is None:
        raise ContractViolation(f"layer number {layer_number} was asked for an LSE and its backend gave none")
    return result.out if _owns(result.out, q, k, v) else result.out.clone(), result.lse


@_attention_with_lse.register_fake
def _(
    order: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    extras: list[Tensor | None],
    layer_number: int,
    save_kv_cache: bool,
    mla_form: str,
    chunk_lens: list[int] | None,
) -> tuple[Tensor, Tensor]:
    heads, width = _width(layer_number, mla_form)
    out = q.new_empty((q.shape[0], heads, width), dtype=_dtype(q, v))
    return out, q.new_empty((q.shape[0], heads), dtype=torch.float32)


def _owns(out: Tensor, *inputs: Tensor | None) -> bool:
    storage = out.untyped_storage().data_ptr()
    return all(t is None or t.untyped_storage().data_ptr() != storage for t in inputs)


def traced_attention(
    layer: AttentionLayer,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    save_kv_cache: bool,
    extras: AttentionExtras | None,
) -> AttentionOutput:
    """Call a layer from code that is being compiled; shapes as ``AttentionLayer.forward``.

    Results beside output and LSE (``aux``) do not pass through a compiled model.
    """
    form, lens, lse = "", None, False
    tensors: list[Tensor | None] = [None] * len(_TENSOR_FIELDS)
    if extras is not None:
        form = extras.mla_form.value if extras.mla_form is not None else ""
        lens = list(extras.chunk_lens_cpu) if extras.chunk_lens_cpu is not None else None
        lse = extras.return_lse
        tensors = [getattr(extras, name) for name in _TENSOR_FIELDS]
    order = _order_token(str(q.device))
    if lse:
        out, states = torch.ops.attnplug.attention_with_lse(
            order, q, k, v, tensors, layer.number, save_kv_cache, form, lens
        )
        return AttentionOutput(out, states)
    out = torch.ops.attnplug.attention(order, q, k, v, tensors, layer.number, save_kv_cache, form, lens)
    return AttentionOutput(out)
