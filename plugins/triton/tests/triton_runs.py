"""Launches with poisoned outputs and scratch: what a kernel does not write stays NaN."""

from __future__ import annotations

import torch
from torch import Tensor
from triton_problem import Problem

from attnplug_triton.kernels.args import Rules
from attnplug_triton.kernels.config import Schedule, TileConfig
from attnplug_triton.kernels.decode_launch import Partials, decode_attention
from attnplug_triton.kernels.extend_launch import NewRows, Queries, extend_attention, row_tiles


def _nan(*shape: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def run_decode(
    p: Problem, rules: Rules, schedule: Schedule, tile: TileConfig, *, width: int = 1, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    tokens, heads, device = p.q.shape[0], p.q.shape[1], p.q.device
    out = _nan(tokens, heads, p.widths.dv, dtype=p.q.dtype, device=device)
    lse = _nan(tokens, heads, device=device)
    rows = max(schedule.partials, 1) * width * heads
    partials = Partials(_nan(rows * p.widths.dv, device=device), _nan(rows, device=device))
    decode_attention(
        p.q,
        p.keys,
        rules,
        p.widths,
        query_len=width,
        schedule=schedule,
        tile=tile,
        partials=partials,
        out=out,
        lse=lse,
        q_rope=p.q_rope,
        pdl=pdl,
    )
    return out, lse


def run_extend(
    p: Problem, rules: Rules, tile: TileConfig, *, uniform: bool = False, surplus: int = 0, new: NewRows | None = None,
    pool: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, heads, device = p.q.shape[0], p.q.shape[1], p.q.device
    out = _nan(tokens, heads, p.widths.dv, dtype=p.q.dtype, device=device)
    lse = _nan(tokens, heads, device=device)
    lens = None if uniform else torch.tensor(p.query_lens, dtype=torch.int32, device=device)
    bound = row_tiles(tuple(p.query_lens), heads // p.keys.k.shape[1], tile.rows) + surplus
    extend_attention(
        p.q, Queries(len(p.lens), lens, p.query_lens[0] if uniform else 0, bound), rules, p.widths,
        keys=p.keys if pool else None, new=new, tile=tile, out=out, lse=lse, q_rope=p.q_rope,
    )  # fmt: skip
    return out, lse
