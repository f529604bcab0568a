"""How a step is captured: CUDA graphs where there is a GPU, the emulated graph elsewhere, by the same calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from .emulated import EmulatedGraph
from .lint import lint_region


class CapturedGraph(Protocol):
    """One graph: begun, ended and replayed."""

    def begin(self) -> None:
        """Start capturing what this thread launches."""

    def end(self) -> None:
        """Stop, and keep the graph."""

    def abort(self) -> None:
        """Stop, and keep nothing."""

    def replay(self) -> None:
        """Run it on the current stream."""

    def mark(self, record: Callable[[], None]) -> None:
        """Record an event at this place of the capture, to be reached at each replay."""

    def reads(self, tensor: Tensor) -> bool:
        """Return whether a replay may read the tensor's memory."""


class GraphFactory(Protocol):
    """Makes the graphs of one runner, which share a memory pool: they are never replayed at once."""

    allocates_in_capture: bool
    """Whether memory taken during a capture belongs to the graphs' pool."""

    def new(self) -> CapturedGraph:
        """Return an empty graph."""

    def region(self) -> Any:
        """Return a context around warm-ups and captures."""

    def lint(self) -> Any:
        """Return a context around a warm-up that refuses what may not be captured, where the capture itself won't."""

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same memory that does not keep it from being reused inside the pool."""


class EmulatedGraphs:
    """Graphs that a CPU runs."""

    allocates_in_capture = False

    def new(self) -> CapturedGraph:
        return _Emulated()

    @contextmanager
    def region(self) -> Iterator[None]:
        yield

    @contextmanager
    def lint(self) -> Iterator[None]:
        # The capture records with the same rules.
        yield

    def alias(self, tensor: Tensor) -> Tensor:
        return tensor.detach()


class _Emulated(EmulatedGraph):
    def __init__(self) -> None:
        super().__init__()
        self._inputs: set[int] | None = None

    def end(self) -> None:
        super().end()
        self._inputs = self.input_addresses()

    def reads(self, tensor: Tensor) -> bool:
        return self._inputs is None or tensor.untyped_storage().data_ptr() in self._inputs


class CudaGraphs:
    """CUDA graphs on a side stream, in one memory pool.

    Args:
        device: The GPU.
        capture_error_mode: What another thread may do meanwhile; see ``torch.cuda.graph``.
    """

    allocates_in_capture = True

    def __init__(self, device: torch.device, *, capture_error_mode: str = "thread_local") -> None:
        self.device, self._mode = device, capture_error_mode
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def new(self) -> CapturedGraph:
        return _CudaGraph(self._pool, self._mode)

    @contextmanager
    def region(self) -> Iterator[None]:
        """Run the body on the side stream, behind all work before and before all work after it."""
        torch.cuda.synchronize(self.device)
        # A collection during a capture could free memory by a call that a capture forbids.
        gc.collect()
        torch.cuda.empty_cache()
        outer = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            # Also where a warm-up was refused: its buffers go back to the outer stream's memory, and kernels that were
            # launched before the refusal may still use them.
            outer.wait_stream(self._stream)

    def lint(self) -> Any:
        return lint_region()

    def alias(self, tensor: Tensor) -> Tensor:
        return unowned(tensor)


class _CudaGraph:
    def __init__(self, pool: Any, mode: str) -> None:
        self._graph, self._pool, self._mode = torch.cuda.CUDAGraph(), pool, mode

    def begin(self) -> None:
        self._graph.capture_begin(pool=self._pool, capture_error_mode=self._mode)

    def end(self) -> None:
        self._graph.capture_end()

    def abort(self) -> None:
        try:
            self._graph.capture_end()
        except RuntimeError:
            # The capture was invalidated by what is being raised; ending it is all that was wanted.
            return
        self._graph.reset()

    def mark(self, record: Callable[[], None]) -> None:
        record()

    def replay(self) -> None:
        self._graph.replay()

    def reads(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cuda"


class _Memory:
    """Bytes of a GPU by address, as the CUDA array interface describes them."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def unowned(tensor: Tensor) -> Tensor:
    """Return a tensor of the same GPU memory that does not own it: a graph's pool may reuse it between replays.

    Args:
        tensor: Any CUDA tensor; the graphs keep its pool mapped for as long as they live.
    """
    if tensor.numel() == 0:
        return tensor.detach()
    spread = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory: Any = _Memory(tensor.data_ptr(), spread * tensor.element_size())
    flat = torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


def graph_factory(device: torch.device) -> GraphFactory:
    """Return CUDA graphs for a GPU, emulated ones otherwise."""
    return CudaGraphs(device) if device.type == "cuda" else EmulatedGraphs()


def capture(graph: CapturedGraph, body: Callable[[], Any]) -> Any:
    """Capture a function's work and return what it returned; nothing is kept when it raises."""
    graph.begin()
    try:
        result = body()
    except BaseException:
        graph.abort()
        raise
    graph.end()
    return result
