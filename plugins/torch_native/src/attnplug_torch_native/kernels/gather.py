"""Reading key or value rows out of a pool's buffer: a view of one run of slots, or a gather into a kept buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from ..workspace import Workspace


def as_bytes(t: Tensor) -> Tensor:
    """Return an fp8 tensor as its bytes, which every device can select, fill and scatter; any other as it is."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


def view_run(buffer: Tensor, first: int, count: int) -> Tensor:
    """Return slots ``first … first + count`` of an NHD buffer, [1, count, Hk, D]: no copy."""
    return buffer[first : first + count].unsqueeze(0)


def gather_slots(buffer: Tensor, slots: Tensor, requests: int, workspace: Workspace | None, name: str) -> Tensor:
    """Gather rows by slot.

    Args:
        buffer: NHD [slots, Hk, D].
        slots: [requests · n] int64, device.
        requests: How many equal parts the slots are.
        workspace: Holds the result until the next gather of the same name; None: a new tensor, as a graph wants it.
        name: Of the buffer: 'k' or 'v'.

    Returns:
        [requests, n, Hk, D], the pool's dtype, dense.
    """
    heads, dim = buffer.shape[1:]
    source = as_bytes(buffer)
    if source.is_contiguous():
        source = source.view(buffer.shape[0], heads * dim)  # one long row a slot copies twice as fast
    out = _select(source, slots, workspace, name)
    return out.view(buffer.dtype).view(requests, slots.numel() // requests, heads, dim)


def gather_pages(
    buffer: Tensor, pages: Tensor, requests: int, page_size: int, workspace: Workspace | None, name: str
) -> Tensor:
    """Gather whole pages of an NHD buffer [slots, Hk, D].

    Args:
        buffer: NHD [slots, Hk, D], dense.
        pages: [requests · n] int64, device.
        requests: How many equal parts the pages are.
        page_size: Slots a page.
        workspace: As ``gather_slots``.
        name: As ``gather_slots``.

    Returns:
        [requests, n · page_size, Hk, D]; the caller cuts off what a page holds beyond its request.
    """
    heads, dim = buffer.shape[1:]
    source = as_bytes(buffer).view(buffer.shape[0] // page_size, page_size * heads * dim)
    out = _select(source, pages, workspace, name)
    return out.view(buffer.dtype).view(requests, pages.numel() // requests * page_size, heads, dim)


def gather_head_major(buffer: Tensor, slots: Tensor, requests: int, workspace: Workspace | None, name: str) -> Tensor:
    """Gather rows by slot from an HND buffer [pages, Hk, page_size, D]; returns as ``gather_slots``."""
    page_size = buffer.shape[2]
    rows = as_bytes(buffer)[slots // page_size, :, slots % page_size]
    return rows.view(buffer.dtype).view(requests, slots.numel() // requests, buffer.shape[1], buffer.shape[3])


def _select(source: Tensor, rows: Tensor, workspace: Workspace | None, name: str) -> Tensor:
    if workspace is None:
        return torch.index_select(source, 0, rows)
    out = workspace.take(name, (rows.numel(), *source.shape[1:]), source.dtype)
    torch.index_select(source, 0, rows, out=out)
    return out
