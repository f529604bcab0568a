"""Pages of the KV pool, and the table of which slot holds which position of a request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from attnplug.errors import OutOfPages

__all__ = ["PageAllocator", "RequestTable"]


class PageAllocator:
    """Who owns which page. Page 0 holds the sink and is never given out.

    Args:
        num_pages: Usable pages, numbered from 1.
        page_size: Tokens a page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold that many tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Return free pages.

        Raises:
            OutOfPages: Fewer are free; none is taken then.
        """
        if count > len(self._free):
            raise OutOfPages(f"{count} pages asked, {len(self._free)} of {self.num_pages} free")
        pages = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Take pages back."""
        self._free.extend(reversed(pages))


class RequestTable:
    """Rows of ``req_to_token``: the slot of each position, kept on the host and written through to the device.

    Args:
        num_requests: Rows beside row 0, which is the padding row and names the sink.
        max_context_len: Positions a row.
        page_size: Tokens a page.
        device: Where backends read it.
    """

    def __init__(self, num_requests: int, max_context_len: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        width = -(-max_context_len // page_size) * page_size
        self.host: npt.NDArray[np.int32] = np.zeros((num_requests + 1, width), dtype=np.int32)
        """[R, width] int32."""
        host = torch.from_numpy(self.host)
        # On a CPU both are one memory. Elsewhere a copy on the current stream keeps a row in order with the kernels.
        self._shared, self._pins = device.type == "cpu", device.type == "cuda"
        self.device_table = host if self._shared else host.to(device)
        """[R, width] int32, device: what the translator reads."""
        self._free_rows = list(range(num_requests, 0, -1))
        self._offsets = np.arange(page_size, dtype=np.int32)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def take_row(self) -> int:
        """Return a free row; the caller checks that there is one."""
        return self._free_rows.pop()

    def release_row(self, row: int) -> None:
        """Take a row back; its entries stay as they are, for nothing reads past a request's length."""
        self._free_rows.append(row)

    def assign(self, row: int, first_page: int, pages: Sequence[int]) -> None:
        """Write the slots of new pages, which follow ``first_page`` pages of the row already there."""
        slots = np.asarray(pages, dtype=np.int32)[:, None] * self.page_size + self._offsets
        start = first_page * self.page_size
        part = slice(start, start + slots.size)
        self.host[row, part] = slots.reshape(-1)
        if not self._shared:
            # Pinned memory of its own: a copy from it waits for nothing, and nothing overwrites it before the copy.
            staged = torch.empty(slots.size, dtype=torch.int32, pin_memory=self._pins)
            staged.copy_(torch.from_numpy(self.host[row, part]))
            self.device_table[row, part].copy_(staged, non_blocking=True)
