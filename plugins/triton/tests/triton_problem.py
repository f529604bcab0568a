"""Requests scattered over a pool, and the dense answer for them: what the kernels' tests are made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug_triton.kernels.args import Keys, Rules, Table, Tree, Widths
from attnplug_triton.kernels.reference import attend


@dataclass
class Problem:
    """B requests in one pool."""

    q: Tensor
    keys: Keys
    widths: Widths
    k_of: list[Tensor]
    v_of: list[Tensor]
    query_lens: list[int]
    lens: list[int]
    positions: Tensor
    q_rope: Tensor | None = None

    def expected(self, rules: Rules, trees: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        outs, lses, row = [], [], 0
        q = self.q if self.q_rope is None else torch.cat([self.q, self.q_rope], -1)
        for b, n in enumerate(self.query_lens):
            places = None
            if trees is not None:
                places = torch.cat([torch.arange(self.lens[b] - n), self.positions[row : row + n].cpu()]).to(q.device)
            k, v = self.k_of[b] * rules.k_scale, self.v_of[b] * (rules.k_scale if self.widths.latent else rules.v_scale)
            out, lse = attend(
                q[row : row + n],
                k,
                v,
                scaling=rules.scaling,
                cap=rules.cap,
                window=rules.window,
                causal=rules.causal,
                sinks=rules.sinks,
                tree=None if trees is None else trees[b].to(q.device),
                positions=places,
            )
            outs.append(out)
            lses.append(lse)
            row += n
        return torch.cat(outs), torch.cat(lses)


def make(
    query_lens: list[int],
    prefix: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    d: int = 64,
    dv: int = 0,
    page: int = 1,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    rope: int = 0,
    device: str = "cpu",
    seed: int = 0,
    spare: int = 3,
) -> Problem:
    g = torch.Generator().manual_seed(seed)
    dv = dv or d
    kv_dtype = kv_dtype or dtype
    lens = [a + b for a, b in zip(query_lens, prefix, strict=True)]
    need = [-(-n // page) for n in lens]
    pages = sum(need) + spare + 1
    order = 1 + torch.randperm(pages - 1, generator=g)
    width = -(-(max([*lens, 1]) + 8) // page) * page + page
    table = torch.full((len(lens) + 2, width), 2**31 - 7, dtype=torch.int32)
    table[0] = 0
    rows = 1 + torch.randperm(len(lens) + 1, generator=g)[: len(lens)]
    total = d + rope
    # What no table lists is NaN; what shares a page with a listed position is huge, and finite.
    k_pool = torch.full((pages * page, kv_heads, total), float("nan"))
    v_pool = torch.full((pages * page, kv_heads, dv), float("nan"))
    top = torch.finfo(kv_dtype).max / 4
    k_of, v_of, taken = [], [], 0
    for b, n in enumerate(lens):
        mine = order[taken : taken + need[b]]
        taken += need[b]
        slots = (mine[:, None] * page + torch.arange(page)).reshape(-1)
        k_pool[slots], v_pool[slots] = top, top
        slots = slots[:n]
        table[rows[b], :n] = slots.int()
        k = torch.randn(n, kv_heads, total, generator=g).to(kv_dtype).float()
        v = torch.randn(n, kv_heads, dv, generator=g).to(kv_dtype).float()
        k_pool[slots], v_pool[slots] = k, v
        k_of.append(k.to(device))
        v_of.append((k[..., :d] if rope else v).to(device))
    q = torch.randn(sum(query_lens), heads, total, generator=g).to(dtype).to(device)
    k_pool = k_pool.to(kv_dtype).to(device)
    v_pool = k_pool[..., :d] if rope else v_pool.to(kv_dtype).to(device)
    keys = Keys(k_pool, v_pool, Table(table.to(device), rows.to(device), 1, page), torch.tensor(lens).to(device))
    positions = torch.cat([torch.arange(p, p + n) for p, n in zip(prefix, query_lens, strict=True)]).to(device)
    return Problem(
        q[..., :d].contiguous() if rope else q, keys, Widths(d, d if rope else dv, rope), k_of, v_of, query_lens, lens,
        positions, q[..., d:].contiguous() if rope else None,
    )  # fmt: skip


def tree_of(problem: Problem, full: bool, seed: int = 0) -> tuple[Tree, list[Tensor], Tensor]:
    """Make a random tree of drafts for each request: (the kernel's tree, [W, S] masks, positions)."""
    g = torch.Generator().manual_seed(seed)
    width, device = problem.query_lens[0], problem.q.device
    masks, cells, starts, positions, at = [], [], [], [], 0
    for n in problem.lens:
        prefix = n - width
        seen = torch.zeros(width, width, dtype=torch.bool)
        depth = torch.zeros(width, dtype=torch.int64)
        for j in range(width):
            parent = -1 if j == 0 else int(torch.randint(0, j, (1,), generator=g))
            if parent >= 0:
                seen[j] = seen[parent]
                depth[j] = depth[parent] + 1
            seen[j, j] = True
        whole = torch.cat([torch.ones(width, prefix, dtype=torch.bool), seen], 1)
        masks.append(whole)
        starts.append(at)
        part = (whole if full else seen).reshape(-1)
        cells.append(part)
        at += part.numel()
        positions.append(prefix + depth)
    places = torch.cat(positions).to(device)
    tree = Tree(torch.cat(cells).to(device), torch.tensor(starts, dtype=torch.int64).to(device), places, full)
    return tree, masks, places


def error(out: Tensor, true: Tensor) -> float:
    """Return ‖out − true‖ / ‖true‖; NaN never passes."""
    size = float(true.norm())
    return float((out.double() - true).norm()) / (size or 1.0)


def worst(lse: Tensor, true: Tensor) -> float:
    """Return the largest distance of an LSE; infinities must agree."""
    assert torch.equal(torch.isneginf(lse), torch.isneginf(true))
    gap = (lse.double() - true).abs()[torch.isfinite(true)]
    return float(gap.max()) if gap.numel() else 0.0
