"""The verify mask of a tree of drafts, read through its layout and laid over a tile's columns."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnplug.batch import ForwardBatch
from attnplug.masks.verify import TreeMaskMode, VerifyMask


@dataclass(frozen=True, slots=True)
class TreeCells:
    """Where each request's cells are in the mask's buffer."""

    mask_of: VerifyMask
    base: Tensor
    """[B] int64, device: first cell of each request."""
    prefix: Tensor
    """[B] int64, device: cached positions before the draft window."""
    start: Tensor
    """[B] int64, device: position of column 0."""
    positions: Tensor
    """[B, W] int64, device: position of each draft, which siblings share."""
    window: int
    _made: list[tuple[Tensor, int, Tensor]] = field(default_factory=list)
    """Requests, columns and masks that were read from the buffer, for ``refresh``."""

    @classmethod
    def of(cls, batch: ForwardBatch, window: int) -> TreeCells | None:
        """Return the cells of a step that verifies a tree; None for a chain and for any other step."""
        info = batch.spec_info
        if not batch.forward_mode.is_target_verify or info is None or info.mask is None:
            return None
        lens = batch.seq_lens if info.mask_seq_lens is None else info.mask_seq_lens
        ends = info.mask.indptr(lens)
        # Requests of padding stand behind the batch that the mask was filled for: any cells do for them.
        rows = torch.arange(info.mask_row, info.mask_row + batch.batch_size, device=ends.device)
        base = ends[rows.clamp_max(ends.numel() - 1)]
        positions = batch.positions.view(batch.batch_size, info.draft_token_num)
        return cls(info.mask, base, batch.seq_lens, batch.kv_start_idx(window), positions, window)

    def mask(self, requests: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        """Return the masks of some requests; the tree decides, and the window by the drafts' positions.

        Args:
            requests: Their places in the batch, [count] int64, device.
            n: Key columns.
            out: [count, W, n] bool, device: overwritten, now and at a refresh; a new tensor where it is None.
        """
        cells = self._read(requests, n)
        if out is not None:
            cells = out.copy_(cells)
        self._made.append((requests, n, cells))
        return cells

    def refresh(self) -> None:
        """Read the buffer again into the masks that were made: drafting has filled it since."""
        for requests, n, cells in self._made:
            cells.copy_(self._read(requests, n))

    def _read(self, lanes: Tensor, n: int) -> Tensor:
        device = self.base.device
        prefix, start = self.prefix[lanes][:, None, None], self.start[lanes][:, None, None]
        positions = self.positions[lanes]
        width = positions.shape[1]
        column = torch.arange(n, device=device) + start  # [count, 1, n]: place in the request
        draft = column - prefix
        inside = draft < width
        query = torch.arange(width, device=device)[None, :, None]
        if self.mask_of.mode is TreeMaskMode.FULL_MASK:
            cell, keys = column, prefix + width
        else:
            cell, keys = draft, torch.full_like(prefix, width)
        at = self.base[lanes][:, None, None] + query * keys + cell
        cached = draft < 0
        hidden_from_table = cached if self.mask_of.mode is TreeMaskMode.QLEN_ONLY else torch.zeros_like(cached)
        at = torch.where(inside & ~hidden_from_table, at, torch.zeros_like(at))
        cells = self.mask_of.buffer[at.clamp(0, self.mask_of.buffer.numel() - 1)]
        cells = (cells | hidden_from_table) & inside
        if self.window >= 0:
            node = torch.gather(positions, 1, draft.squeeze(1).clamp(0, width - 1))[:, None, :]
            cells &= positions[:, :, None] - torch.where(cached, column, node) <= self.window
        return cells
