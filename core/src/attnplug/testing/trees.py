"""Draft trees for target-verify: parents, and what each draft may see."""

from __future__ import annotations

import torch
from torch import Tensor

from .case import Case


def draw_trees(case: Case, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Return what each request's drafts may see, [W, S + W] bool each, and the parents, [B, W] int64.

    Draft 0 is the root. With a mask of cells for cached positions too ('full'), a few of those are hidden: a reader of
    the mask sees it. A case whose ``arg`` is 'blind' hides from each last draft all that its mask has cells for.
    """
    width, random = case.queries[0], torch.Generator().manual_seed(case.seed + 29)
    parents = torch.full((len(case.queries), width), -1, dtype=torch.int64)
    trees = []
    for b, prefix in enumerate(case.prefix):
        for j in range(1, width):
            parents[b, j] = int(torch.randint(0, j, (1,), generator=random))
        tree = torch.zeros(width, prefix + width, dtype=torch.bool)
        tree[:, :prefix] = True
        for j in range(width):
            node = j
            while node >= 0:
                tree[j, prefix + node] = True
                node = int(parents[b, node])
        if case.mask == "full" and prefix > 4:
            tree[:, 1] = False
            tree[width // 2 :, 3] = False
        if case.arg == "blind":
            tree[width - 1, 0 if case.mask == "full" else prefix :] = False
        trees.append(tree.to(device))
    return trees, parents
