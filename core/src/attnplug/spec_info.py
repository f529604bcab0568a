"""What one step of speculative decoding adds to a batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from .masks.verify import VerifyMask


@dataclass(frozen=True, slots=True)
class SpecInfo:
    """Drafts to verify, or accepted tokens to extend by. B requests, W = draft_token_num."""

    draft_token_num: int
    """W: queries a request, the same for all; a request with fewer drafts is padded."""
    mask: VerifyMask | None = None
    """None: a chain, where query j sees the cached positions and drafts 0 … j."""
    mask_row: int = 0
    """Row of the mask's batch that this batch's first request is: a slice of a batch reads the same buffer."""
    mask_seq_lens: Tensor | None = None
    """[B of the mask] int64, device: cached lengths of the batch the mask was filled for; None: this batch's own."""
    parents: Tensor | None = None
    """[B, W] int64, device: each draft's parent in the window, -1 for the root; None for a chain."""
    accept_lens: Tensor | None = None
    """[B] int32, device: accepted tokens, for draft-extend."""

    def rows(self, start: int, stop: int, seq_lens: Tensor) -> SpecInfo:
        """Return the part that belongs to requests ``start … stop`` of a batch with these cached lengths."""
        return replace(
            self,
            mask_row=self.mask_row + start,
            mask_seq_lens=seq_lens if self.mask_seq_lens is None else self.mask_seq_lens,
            parents=None if self.parents is None else self.parents[start:stop],
            accept_lens=None if self.accept_lens is None else self.accept_lens[start:stop],
        )
