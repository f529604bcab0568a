"""What only a GPU can show of a replay: that nothing synchronised and nothing was allocated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import ContractViolation


@contextmanager
def no_synchronisation(device: torch.device, *, what: str) -> Iterator[None]:
    """Refuse host synchronisations of the body by torch's sync-debug mode; nothing to see on a CPU.

    Raises:
        ContractViolation: With torch's message, which names the operation.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        raise ContractViolation(
            f"{what} synchronised with the host: {error}",
            remedy="read host mirrors (seq_lens_cpu), or bounds, in place of device tensors",
        ) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def may_synchronise(device: torch.device) -> Iterator[None]:
    """Let the body synchronise inside ``no_synchronisation``: a capture, or a check that is made once."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def no_allocation(device: torch.device, *, what: str) -> Iterator[None]:
    """Refuse allocations of GPU memory by the body; nothing to see on a CPU.

    Raises:
        ContractViolation: With how many blocks and bytes.
    """
    if device.type != "cuda":
        yield
        return
    blocks, size = _allocated(device)
    yield
    more, grown = _allocated(device)
    if more != blocks:
        raise ContractViolation(
            f"{what} allocated {more - blocks} blocks, {grown - size} bytes of GPU memory",
            remedy="allocate in init_cuda_graph_state; temporaries of a captured step come from the graph's pool",
        )


def _allocated(device: torch.device) -> tuple[int, int]:
    stats = torch.cuda.memory_stats(device)
    return stats["allocation.all.allocated"], stats["allocated_bytes.all.allocated"]
