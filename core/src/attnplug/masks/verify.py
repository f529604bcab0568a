"""The target-verify mask: filled in place by drafting, read by the verifier; buffer and layout frozen together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class TreeMaskMode(str, Enum):
    """Which keys a verify mask has a cell for."""

    FULL_MASK = "full_mask"
    """Per request [W, S + W]: the cached S positions, then the draft window of W."""
    QLEN_ONLY = "qlen_only"
    """Per request [W, W]: the draft window only; every cached position is visible."""


def tree_mask_numel(mode: TreeMaskMode, max_bs: int, draft_token_num: int, max_context_len: int) -> int:
    """Return how many cells ``max_bs`` requests need at most."""
    keys = draft_token_num if mode is TreeMaskMode.QLEN_ONLY else max_context_len + draft_token_num
    return max_bs * draft_token_num * keys


@dataclass(frozen=True, slots=True)
class VerifyMask:
    """A verify mask with everything a writer and a reader must agree on. Frozen: to grow it, make another."""

    buffer: Tensor
    """[numel] bool, on the verifier's device; owned by the verifying backend, overwritten by each drafting step."""
    mode: TreeMaskMode
    max_bs: int
    draft_token_num: int
    max_context_len: int
    is_read: bool = True
    """False: the backend verifies chains only and reads no mask; trees are refused."""

    @classmethod
    def allocate(
        cls, mode: TreeMaskMode, *, max_bs: int, draft_token_num: int, max_context_len: int, device: torch.device
    ) -> VerifyMask:
        """Allocate a mask for the largest batch, all cells visible."""
        numel = tree_mask_numel(mode, max_bs, draft_token_num, max_context_len)
        buffer = torch.ones(numel, dtype=torch.bool, device=device)
        return cls(buffer, mode, max_bs, draft_token_num, max_context_len)

    def fits(self, bs: int) -> bool:
        """Whether a batch of ``bs`` requests has room."""
        return bs <= self.max_bs

    def indptr(self, seq_lens: Tensor) -> Tensor:
        """Return where each request's cells start, without a host synchronisation.

        Args:
            seq_lens: Cached lengths, without the draft window, [B] int64, device.

        Returns:
            [B + 1] int64 on the same device; request i owns ``buffer[indptr[i]:indptr[i + 1]]``, row-major by query.
        """
        width = self.draft_token_num
        keys = torch.full_like(seq_lens, width)
        if self.mode is TreeMaskMode.FULL_MASK:
            keys = keys + seq_lens
        cells = torch.zeros(seq_lens.numel() + 1, dtype=torch.int64, device=seq_lens.device)
        torch.cumsum(keys * width, 0, out=cells[1:])
        return cells
