"""The captured sizes of one kind of step, over one set of fixed tensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..backend import AttentionBackend
from ..batch import ForwardBatch
from ..context import ForwardContext, forward_context
from ..modes import ForwardMode, SharedReadEnds
from .buffers import BatchBuffers
from .capture import CapturedGraph, GraphFactory, capture
from .device_checks import no_allocation, no_synchronisation
from .glue import GlueGraphs
from .inputs import FixedInputs, ModelFn, Rows, check_outputs, narrow
from .options import EVERY_REPLAY, GraphOptions
from .overlap import ReadEndFence
from .pointers import PointerCheck


class Kind(NamedTuple):
    """What steps must agree in to be served by one set of graphs."""

    mode: ForwardMode
    width: int
    """Queries a request."""
    mask: int | None = None
    """Address of the verify mask that a capture reads."""

    def __str__(self) -> str:
        return f"{self.mode.value}, {self.width} queries a request{'' if self.mask is None else ', by a mask'}"


class Runtime(NamedTuple):
    """What all kinds of a runner share."""

    model_fn: ModelFn
    backend: AttentionBackend
    device: torch.device
    factory: GraphFactory
    options: GraphOptions
    fence: ReadEndFence | None
    glue: GlueGraphs | None


@dataclass(slots=True)
class _Captured:
    graph: CapturedGraph
    outputs: Tensor | tuple[Tensor, ...]
    pointers: PointerCheck
    is_marked: bool
    """The graph holds the fence's event, behind the in-graph metadata."""
    replays: int = 0


class CapturedSizes:
    """One kind of step, captured in every bucket, the largest first so that the others fit into its memory.

    Args:
        kind: Which steps.
        example: A step of the kind; its spaces, state and mask are those of every other.
        inputs: The model's inputs of that step.
        buckets: Batch sizes.
        runtime: The runner's.
    """

    def __init__(
        self,
        kind: Kind,
        example: ForwardBatch,
        inputs: Mapping[str, Tensor],
        buckets: tuple[int, ...],
        runtime: Runtime,
    ) -> None:
        self.kind, self._run = kind, runtime
        # Requests of nobody: what is captured and what idles is padding alone.
        self.template = example.slice(0, 0)
        plan, top = example.kv_loc_plan, max(buckets)
        pool = runtime.backend.env.kv_pool
        # Ordinary tensors, also where a capture runs in inference mode: later steps may write from either.
        with torch.inference_mode(False):
            self.buffers = BatchBuffers(
                top,
                top * kind.width,
                runtime.device,
                spaces=() if plan is None else tuple(plan.write_slots),
                draft_token_num=kind.width if kind.mode.is_target_verify else 0,
                sink_slot=pool.sink_slot,
            )
            self.inputs = FixedInputs(inputs, top * kind.width, top, runtime.device, runtime.options.request_inputs)
        self._sizes: dict[int, _Captured] = {}
        with torch.no_grad(), runtime.factory.region():
            for bucket in sorted(buckets, reverse=True):
                self._sizes[bucket] = self._capture(bucket)

    def _view(self, batch: ForwardBatch, bucket: int) -> ForwardBatch:
        fill = self._run.backend.get_cuda_graph_seq_len_fill_value()
        return self.buffers.load(batch, pad_to=bucket, seq_len_fill=fill)

    def _capture(self, bucket: int) -> _Captured:
        run, backend = self._run, self._run.backend
        self.buffers.clear()
        self.inputs.clear()
        inputs = self.inputs.view(bucket * self.kind.width, bucket)
        view = self._view(self.template, bucket)
        backend.check_batch(view)
        graph, is_marked = run.factory.new(), False

        def step(mark: bool = False) -> Tensor | tuple[Tensor, ...]:
            nonlocal is_marked
            backend.init_forward_metadata_in_graph(view)
            if mark and run.fence is not None:
                is_marked = run.fence.mark(graph)
            return run.model_fn(inputs, view)

        with forward_context(ForwardContext(backend, batch=view)):
            for i in range(run.options.warmups):
                backend.init_forward_metadata_out_graph(view, in_capture=True)
                # The first run may compile and tune, which a capture never does; the last is what it will record.
                with run.factory.lint() if i and i == run.options.warmups - 1 else nullcontext():
                    step()
            backend.on_after_cuda_graph_warmup()
            backend.init_forward_metadata_out_graph(view, in_capture=True)
            pointers = PointerCheck(backend)
            outputs = capture(graph, lambda: step(mark=True))
        pointers.keep_only(graph.reads)
        rows = bucket if run.options.output_rows is Rows.REQUESTS else bucket * self.kind.width
        check_outputs(outputs, rows, run.options.output_rows)
        alias = run.factory.alias
        kept = alias(outputs) if isinstance(outputs, Tensor) else tuple(alias(t) for t in outputs)
        return _Captured(graph, kept, pointers, is_marked)

    def replay(self, inputs: Mapping[str, Tensor], batch: ForwardBatch, bucket: int) -> Tensor | tuple[Tensor, ...]:
        """Refresh and replay; returns the step's rows of the outputs, which the next replay overwrites."""
        run, one = self._run, self._sizes[bucket]
        idle = batch.forward_mode is ForwardMode.IDLE
        step = self.template if idle else batch
        tokens, requests = step.num_tokens, step.batch_size
        if not idle:
            self.inputs.load(
                inputs,
                tokens=tokens,
                requests=requests,
                padded_tokens=bucket * self.kind.width,
                padded_requests=bucket,
            )
        what = f"replay of {bucket} requests ({self.kind})"
        if run.options.strict:
            with no_synchronisation(run.device, what=what):
                self._refresh_and_replay(one, step, bucket, what)
        else:
            self._refresh_and_replay(one, step, bucket, what)
        if run.options.output_rows is Rows.REQUESTS:
            return narrow(one.outputs, batch.batch_size)
        return narrow(one.outputs, batch.num_tokens)

    def _refresh_and_replay(self, one: _Captured, step: ForwardBatch, bucket: int, what: str) -> None:
        run, backend = self._run, self._run.backend
        view = self._view(step, bucket)
        backend.check_batch(view)
        if run.fence is not None:
            run.fence.arm(backend.shared_read_ends(self.kind.mode), marked=one.is_marked)
        if run.glue is not None:
            run.glue.prepare((self.kind, bucket), view)
        else:
            backend.init_forward_metadata_out_graph(view)
        if run.options.pointer_checks == EVERY_REPLAY or one.replays < run.options.pointer_checks:
            one.pointers.compare(backend, what=what)
        one.replays += 1
        if run.fence is not None:
            run.fence.reached(SharedReadEnds.PRE_REPLAY)
        if run.options.strict:
            with no_allocation(run.device, what=what):
                one.graph.replay()
        else:
            one.graph.replay()
        if run.fence is not None:
            run.fence.reached(SharedReadEnds.POST_REPLAY)
