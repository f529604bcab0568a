"""Prefill from graphs with breaks: the model between its attention calls is captured, the calls stay eager."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backend import AttentionBackend
from ..batch import ForwardBatch
from ..context import ForwardContext, forward_context
from ..errors import ContractViolation
from ..modes import ForwardMode, SharedReadEnds
from .breaks import BreakingBackend, Call
from .buckets import bucket_for, checked_buckets
from .buffers import BatchBuffers
from .capture import CapturedGraph, GraphFactory, graph_factory
from .dummy import dummy_lens, dummy_prefill
from .inputs import FixedInputs, ModelFn, Rows, check_outputs, narrow
from .options import EVERY_REPLAY, GraphOptions
from .overlap import ReadEndFence
from .pointers import PointerCheck

MODES = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DLLM_EXTEND)


@dataclass(slots=True)
class _Captured:
    pieces: list[CapturedGraph]
    calls: list[Call]
    outputs: Tensor | tuple[Tensor, ...]
    metadata: Any
    """Crosses the breaks, where the backend opted in; else None."""
    pointers: PointerCheck | None
    replays: int = 0


@dataclass(slots=True)
class _Mode:
    example: ForwardBatch
    buffers: BatchBuffers
    inputs: FixedInputs
    sizes: dict[int, _Captured]


class BreakableGraphRunner:
    """Replays prefills by token-count buckets, any number of requests of any lengths.

    Metadata is rebuilt at each replay, or, where the backend opts in
    (``use_captured_forward_metadata_for_breakable_cuda_graph``), made at capture and refreshed in place.

    Args:
        model_fn: The model's forward; runs at warm-up and capture only.
        backend: Serves its attention layers; it need not serve graphs unless it opts in.
        buckets: Token counts to capture, see ``token_buckets``.
        max_requests: Most requests of a captured prefill; the backend's own bound holds too.
        device: Where the step runs; a CPU runs emulated graphs.
        options: How to capture and what to check.
        fence: Where the steps' shared reads end, for overlap scheduling.
        factory: Makes the graphs; share one between runners whose replays never run at once.
        dp_attention: Ranks attend to different requests: backends may then prefer mixed prefills eager.

    Raises:
        ConfigError: No bucket, or one below 1.
    """

    def __init__(
        self,
        model_fn: ModelFn,
        backend: AttentionBackend,
        *,
        buckets: Iterable[int],
        max_requests: int,
        device: torch.device,
        options: GraphOptions | None = None,
        fence: ReadEndFence | None = None,
        factory: GraphFactory | None = None,
        dp_attention: bool = False,
    ) -> None:
        self.buckets = checked_buckets(buckets)
        bound = backend.prefill_cuda_graph_max_batch_size
        self.max_requests = max_requests if bound is None else min(max_requests, bound)
        self._model_fn, self._backend, self._device = model_fn, backend, device
        self._options, self._fence = options or GraphOptions(), fence
        self._factory, self._dp_attention = factory or graph_factory(device), dp_attention
        self._modes: dict[ForwardMode, _Mode] = {}

    def can_run(self, batch: ForwardBatch) -> list[str]:
        """Return every reason why a step must run eagerly; empty where a graph serves it."""
        mode, reasons = batch.forward_mode, []
        if mode not in MODES:
            reasons.append(f"{mode.value} is not captured in pieces; {', '.join(m.value for m in MODES)} are")
        if not batch.num_tokens:
            reasons.append("no token")
        if bucket_for(batch.num_tokens, self.buckets) is None:
            reasons.append(f"{batch.num_tokens} tokens; the largest bucket is {self.buckets[-1]}")
        if batch.batch_size > self.max_requests:
            reasons.append(f"{batch.batch_size} requests; a captured prefill has at most {self.max_requests}")
        if batch.encoder_out_cache_loc is not None:
            reasons.append("encoder rows are written in this step; their number is not the tokens'")
        if batch.uses_graph_buffers:
            reasons.append("the batch is a graph's own view already")
        if (
            mode is ForwardMode.MIXED
            and self._dp_attention
            and self._backend.prefer_eager_mixed_prefill_under_dp_attention
        ):
            reasons.append(f"{self._backend.name} prefers mixed prefills eager while ranks attend to other requests")
        captured = self._modes.get(mode)
        if captured is not None and not reasons:
            reasons += captured.buffers.problems(batch)
        return reasons

    def capture(self, inputs: Mapping[str, Tensor], batch: ForwardBatch) -> None:
        """Capture a step's mode in every bucket, unless it is captured.

        Args:
            inputs: The model's inputs of that step: names, dtypes and shapes are taken.
            batch: Any step of the mode; its values are not used.

        Raises:
            ContractViolation: The step cannot be captured; a bucket is too large; or the model, or a backend's
                metadata, does what a capture may not.
        """
        self._refuse(batch)
        if batch.forward_mode in self._modes:
            return
        plan, top = batch.kv_loc_plan, self.buckets[-1]
        with torch.inference_mode(False):
            buffers = BatchBuffers(
                self.max_requests,
                top,
                self._device,
                spaces=() if plan is None else tuple(plan.write_slots),
                sink_slot=self._backend.env.kv_pool.sink_slot,
            )
            fixed = FixedInputs(inputs, top, self.max_requests, self._device, self._options.request_inputs)
        made = _Mode(batch, buffers, fixed, {})
        with torch.no_grad(), self._factory.region():
            for bucket in reversed(self.buckets):
                made.sizes[bucket] = self._capture(made, bucket)
        self._modes[batch.forward_mode] = made

    def _capture(self, mode: _Mode, bucket: int) -> _Captured:
        backend, sink = self._backend, self._backend.env.kv_pool.sink_slot
        mode.buffers.clear()
        mode.inputs.clear()
        inputs = mode.inputs.view(bucket, self.max_requests)
        lens = dummy_lens(backend, bucket, self.max_requests)
        view = mode.buffers.load(dummy_prefill(mode.example, lens, sink_slot=sink))
        metadata, pointers = None, None
        breaking = BreakingBackend(backend, self._factory)
        if backend.use_captured_forward_metadata_for_breakable_cuda_graph:
            metadata = backend.init_forward_metadata_for_breakable_cuda_graph_capture(view)
            backend.forward_metadata = metadata
            pointers = PointerCheck(backend)
        else:
            # Attention reads it eagerly, as any step's: nothing of a backend has a fixed address here.
            view = view.replace(uses_graph_buffers=False)
            backend.init_forward_metadata(view)
        with forward_context(ForwardContext(breaking, batch=view)):
            for _ in range(max(self._options.warmups, 1)):
                breaking.watch()
                self._model_fn(inputs, view)
            backend.on_after_cuda_graph_warmup()
            breaking.begin()
            try:
                outputs = self._model_fn(inputs, view)
                breaking.end()
            except BaseException:
                breaking.abort()
                raise
        per_token = self._options.output_rows is Rows.TOKENS
        check_outputs(outputs, bucket if per_token else self.max_requests, self._options.output_rows)
        if pointers is not None:
            pieces = tuple(breaking.pieces)
            pointers.keep_only(lambda tensor: any(piece.reads(tensor) for piece in pieces))
        alias = self._factory.alias
        kept = alias(outputs) if isinstance(outputs, Tensor) else tuple(alias(t) for t in outputs)
        return _Captured(breaking.pieces, breaking.calls, kept, metadata, pointers)

    def run(self, inputs: Mapping[str, Tensor], batch: ForwardBatch) -> Tensor | tuple[Tensor, ...]:
        """Run a prefill in pieces.

        Args:
            inputs: By name, a row a token (or a request, as the options say), device; copied.
            batch: The step, unpadded; attention is called with it.

        Returns:
            The model's outputs, the step's rows only; views of fixed memory that the next run overwrites.

        Raises:
            ContractViolation: ``can_run`` gives reasons; or the replay breaks the contract.
            BatchError: Inputs differ from those captured.
        """
        self.capture(inputs, batch)
        mode = self._modes[batch.forward_mode]
        bucket = bucket_for(batch.num_tokens, self.buckets)
        assert bucket is not None  # can_run has looked
        one, backend, fence = mode.sizes[bucket], self._backend, self._fence
        tokens, requests = batch.num_tokens, batch.batch_size
        with torch.no_grad(), forward_context(ForwardContext(backend, batch=batch)):
            mode.inputs.load(
                inputs,
                tokens=tokens,
                requests=requests,
                padded_tokens=bucket,
                padded_requests=self.max_requests,
            )
            static = mode.buffers.load(batch)
            mode.buffers.clear_tail(tokens, bucket)
            if fence is not None:
                fence.arm_eager(backend.shared_read_ends(batch.forward_mode))
            self._refresh(one, batch, static, bucket)
            one.pieces[0].replay()
            for call, piece in zip(one.calls, one.pieces[1:], strict=True):
                call.run(backend, batch)
                piece.replay()
            if fence is not None:
                fence.reached(SharedReadEnds.POST_REPLAY)
        return narrow(one.outputs, tokens if self._options.output_rows is Rows.TOKENS else requests)

    def _refresh(self, one: _Captured, batch: ForwardBatch, static: ForwardBatch, bucket: int) -> None:
        backend, fence = self._backend, self._fence
        backend.check_batch(batch)
        if one.pointers is None:
            backend.init_forward_metadata_out_graph(batch)
        else:
            backend.prepare_forward_metadata_for_breakable_cuda_graph_replay(
                one.metadata, batch, static_forward_batch=static
            )
            if self._options.pointer_checks == EVERY_REPLAY or one.replays < self._options.pointer_checks:
                one.pointers.compare(backend, what=f"replay of a prefill of {bucket} tokens")
        one.replays += 1
        if fence is not None:
            fence.reached(SharedReadEnds.PRE_REPLAY)
        if one.pointers is None:
            backend.init_forward_metadata_in_graph(batch)
        if fence is not None:
            fence.reached(SharedReadEnds.IN_REPLAY)

    def _refuse(self, batch: ForwardBatch) -> None:
        reasons = self.can_run(batch)
        if reasons:
            raise ContractViolation(
                "no captured prefill can serve this step:\n  " + "\n  ".join(reasons),
                remedy="ask can_run first and run such steps eagerly",
            )
