"""Launching of the Hopper extend kernel, and which calls it takes."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .args import LOG2E, Keys, Rules, Widths, next_power
from .extend_hopper import extend_hopper_kernel

ROWS = 128
"""Query rows of a program."""
_WIDTH = 128
_PAGE = 64
_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def takes(q: Tensor, keys: Keys, rules: Rules, widths: Widths) -> bool:
    """Whether the kernel computes this call: head width 128, whole pages of 64, no window, cap or tree."""
    pool = keys.k
    return (
        widths.d == _WIDTH
        and widths.dv == _WIDTH
        and not widths.rope
        and q.dtype in (torch.bfloat16, torch.float16)
        and pool.dtype == q.dtype
        and keys.v.dtype == q.dtype
        and keys.table.page % _PAGE == 0
        and keys.table.entry == 1
        and pool.is_contiguous()
        and keys.v.is_contiguous()
        and rules.window < 0
        and not rules.cap
        and rules.tree is None
        # The causal edge of a program's rows must not leave its first tile.
        and ROWS * pool.shape[1] // q.shape[1] <= _PAGE
    )


def extend_hopper(
    q: Tensor,
    query_lens: Tensor | None,
    rules: Rules,
    keys: Keys,
    *,
    batch_size: int,
    max_query_len: int,
    uniform: int,
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """Attend query rows to a pool of pages. Every query must see a key.

    Args:
        q: [T, Hq, 128], columns contiguous, request after request.
        query_lens: [B] int32, device; None: the same for each.
        rules: What attention means; see ``takes``.
        keys: Where keys are, this step's included.
        batch_size: B.
        max_query_len: Most queries of a request.
        uniform: Queries of each request, where query_lens is None.
        out: [T, Hq, 128] contiguous, written.
        lse: [T, Hq] float32 contiguous, written where given: natural log, without sinks.
    """
    heads, kv_heads = q.shape[1], keys.k.shape[1]
    k = TensorDescriptor.from_tensor(keys.k.view(keys.k.shape[0], -1), [_PAGE, _WIDTH], _SHARED)
    v = TensorDescriptor.from_tensor(keys.v.view(keys.v.shape[0], -1), [_PAGE, _WIDTH], _SHARED)
    tiles = triton.cdiv(max_query_len * heads // kv_heads, ROWS)
    extend_hopper_kernel[(kv_heads * tiles, batch_size)](
        k,
        v,
        q,
        keys.table.ids,
        keys.table.rows,
        keys.lens,
        query_lens if query_lens is not None else keys.table.ids,
        rules.sinks if rules.sinks is not None else out,
        out,
        lse if lse is not None else out,
        rules.scaling * rules.k_scale * LOG2E,
        rules.v_scale,
        batch_size,
        keys.extra_len,
        uniform,
        HQ=heads,
        HK=kv_heads,
        D=_WIDTH,
        BB=next_power(batch_size, 1),
        Q_TOKEN=q.stride(0),
        Q_HEAD=q.stride(1),
        TABLE_ROW=keys.table.ids.stride(0),
        UNIFORM=query_lens is None,
        CAUSAL=rules.causal,
        HAS_SINKS=rules.sinks is not None,
        HAS_LSE=lse is not None,
        num_warps=4,
    )
