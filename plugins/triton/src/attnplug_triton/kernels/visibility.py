"""Which keys a tile's queries see: causal, bottom-right; windows; and the cells of a tree of drafts."""

# Kernel arguments are typed by Triton when it compiles; `l` is the softmax's sum in every paper on it.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-warn-return-any, no-warn-unreachable
# ruff: noqa: ANN001, ANN201, ANN202, E741, SIM108, RUF100
from __future__ import annotations

import triton
import triton.language as tl

NO_TREE = tl.constexpr(0)
FULL_TREE = tl.constexpr(1)
"""A request's cells are [W, S + W]: every key has one."""
QLEN_TREE = tl.constexpr(2)
"""A request's cells are [W, W]: the draft window only."""


@triton.jit
def visible(
    at,
    token,
    n,
    width,
    first_row,
    MASK,
    cells,
    POSITIONS,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
):
    """Return which keys each query sees, [M, BN].

    Args:
        at: [BN] int32, positions of the keys.
        token: [M] int32, number of each row's query in its request.
        n: Keys of the request.
        width: Queries of the request, the last of which is at n - 1.
        first_row: The request's first query row in the batch.
        MASK: Pointer to the tree's cells, bytes; not read without TREE.
        cells: First cell of the request, int64.
        POSITIONS: Pointer to the position of each query row, int64; read for a tree under a window.
        CAUSAL: Whether position bounds the keys.
        WINDOW: -1 for none.
        TREE: NO_TREE, FULL_TREE or QLEN_TREE; replaces CAUSAL.
    """
    key, prefix = at[None, :], n - width
    seen = (key < n) & (token[:, None] >= 0)
    if TREE == NO_TREE:
        place = (prefix + token)[:, None]
        if CAUSAL:
            seen = seen & (key <= place)
        if WINDOW >= 0:
            seen = seen & (place - key <= WINDOW)
            if not CAUSAL:
                seen = seen & (key - place <= WINDOW)
    else:
        draft = at - prefix
        inside = (draft >= 0) & (draft < width)
        query = tl.minimum(token, width - 1).to(tl.int64)
        if TREE == FULL_TREE:
            cell = tl.load(MASK + cells + query[:, None] * n + key, mask=key < n, other=0)
            seen = seen & (cell != 0)
        else:
            cell = tl.load(MASK + cells + query[:, None] * width + draft[None, :], mask=inside[None, :], other=1)
            seen = seen & (cell != 0)
        if WINDOW >= 0:
            node = tl.load(POSITIONS + first_row + draft, mask=inside, other=0)
            key_at = tl.where(inside, node, at.to(tl.int64))
            place = tl.load(POSITIONS + first_row + query)
            seen = seen & (place[:, None] - key_at[None, :] <= WINDOW)
    return seen
