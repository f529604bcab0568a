"""Launching of the Hopper MLA decode kernel, and which calls it takes."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .args import LOG2E, Keys, Rules, Widths
from .config import Schedule
from .decode_launch import Partials, merge_partials
from .mla_hopper import mla_hopper_kernel

_HEADS = 64
_PAGE = 64
_LATENT, _ROPE = 512, 64
_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def takes(q: Tensor, keys: Keys, rules: Rules, widths: Widths, query_len: int, schedule: Schedule) -> bool:
    """Whether the kernel computes this call: one query a request, 64 heads or a multiple, 512 + 64, pages of 64."""
    return (
        query_len == 1
        and widths == Widths(_LATENT, _LATENT, _ROPE)
        and q.shape[1] % _HEADS == 0
        and q.dtype in (torch.bfloat16, torch.float16)
        and keys.k.dtype == q.dtype
        and keys.k.is_contiguous()
        and keys.table.page % _PAGE == 0
        and keys.table.entry == 1
        and keys.extra_len == 0
        and rules.window < 0
        and not rules.cap
        and rules.sinks is None
        and rules.tree is None
        and schedule.kind in ("single", "equal")
    )


def mla_hopper(
    q: Tensor,
    q_rope: Tensor,
    keys: Keys,
    rules: Rules,
    *,
    schedule: Schedule,
    partials: Partials | None,
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """Attend one query of each request to latent rows. Nothing is allocated, nothing synchronises.

    Args:
        q: [B, Hq, 512], columns contiguous.
        q_rope: [B, Hq, 64] likewise.
        keys: Where latent rows are, [slots, 1, 576].
        rules: What attention means; see ``takes``.
        schedule: 'single' or 'equal'.
        partials: Scratch for what is shared out; None for 'single'.
        out: [B, Hq, 512] contiguous, written.
        lse: [B, Hq] float32 contiguous, written where given: natural log.
    """
    batch, heads = q.shape[0], q.shape[1]
    rows = keys.k.view(keys.k.shape[0], _LATENT + _ROPE)
    half = TensorDescriptor.from_tensor(rows, [_PAGE, _LATENT // 2], _SHARED)
    rope = TensorDescriptor.from_tensor(rows, [_PAGE, _ROPE], _SHARED)
    single = schedule.kind == "single"
    part = Partials(out, out) if partials is None else partials
    mla_hopper_kernel[(heads // _HEADS, schedule.splits, batch)](
        half,
        rope,
        q,
        q_rope,
        keys.table.ids,
        keys.table.rows,
        keys.lens,
        out,
        lse if lse is not None else out,
        part.attn_logits,
        part.attn_lse,
        rules.scaling * rules.k_scale * LOG2E,
        rules.k_scale,
        schedule.splits,
        HQ=heads,
        Q_TOKEN=q.stride(0),
        Q_HEAD=q.stride(1),
        QR_TOKEN=q_rope.stride(0),
        QR_HEAD=q_rope.stride(1),
        TABLE_ROW=keys.table.ids.stride(0),
        SINGLE=single,
        HAS_LSE=lse is not None,
        num_warps=4,
    )
    if not single:
        merge_partials(part, keys, rules, schedule, _PAGE, _LATENT, query_len=1, out=out, lse=lse, pdl=False)
