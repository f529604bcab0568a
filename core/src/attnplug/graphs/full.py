"""Whole steps as graphs: decode and target-verify, and whatever else has one query width, by batch-size buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..backend import AttentionBackend
from ..batch import ForwardBatch
from ..errors import ContractViolation
from ..modes import ForwardMode, GraphLevel
from .buckets import bucket_for, checked_buckets
from .capture import GraphFactory, graph_factory
from .glue import GlueGraphs
from .inputs import ModelFn
from .options import GraphOptions
from .overlap import ReadEndFence
from .sizes import CapturedSizes, Kind, Runtime
from .state import ensure_graph_state


class GraphRunner:
    """Replays steps of uniform query width from graphs, padded to the next bucket.

    A kind of step is captured, in every bucket, by ``capture`` or at its first ``run``. A replay loads the step into
    fixed tensors, refreshes the out-of-graph metadata and launches one graph.

    Args:
        model_fn: The model's forward; runs at warm-up and capture only.
        backend: Serves its attention layers.
        buckets: Batch sizes to capture, see ``batch_buckets``.
        device: Where the step runs; a CPU runs emulated graphs.
        max_query_width: Most queries a request of any kind: 1, or the draft window.
        options: How to capture and what to check.
        fence: Where the steps' shared reads end, for overlap scheduling.
        factory: Makes the graphs; share one between runners whose replays never run at once.

    Raises:
        ConfigError: No bucket, or one below 1.
        ContractViolation: The backend serves no graphs.
    """

    def __init__(
        self,
        model_fn: ModelFn,
        backend: AttentionBackend,
        *,
        buckets: Iterable[int],
        device: torch.device,
        max_query_width: int = 1,
        options: GraphOptions | None = None,
        fence: ReadEndFence | None = None,
        factory: GraphFactory | None = None,
    ) -> None:
        self.buckets, self.max_query_width = checked_buckets(buckets), max_query_width
        self._options = options or GraphOptions()
        factory = factory or graph_factory(device)
        top = self.buckets[-1]
        ensure_graph_state(backend, top, top * max_query_width)
        self._backend, self._max_context_len = backend, backend.env.limits.max_context_len
        self._runtime = Runtime(model_fn, backend, device, factory, self._options, fence, None)
        self._glue = GlueGraphs(backend, factory, max_context_len=self._max_context_len)
        self._kinds: dict[Kind, CapturedSizes] = {}

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of step that are captured."""
        return tuple(self._kinds)

    def glue_refusal(self, mode: ForwardMode) -> str:
        """Return why metadata preparation is not captured in a mode; empty where it is."""
        return self._glue.refusal(mode) if self._options.glue else "the options leave the glue graph off"

    def can_run(self, batch: ForwardBatch) -> list[str]:
        """Return every reason why a step must run eagerly; empty where a graph serves it."""
        if batch.forward_mode is ForwardMode.IDLE:
            return self._idle_reasons(batch)
        reasons = []
        widths = set(batch.query_lens_cpu)
        level, mode = self._backend.graph_level, batch.forward_mode
        if not batch.batch_size:
            reasons.append("no request")
        if len(widths) > 1:
            reasons.append(f"query widths {sorted(widths)}; a graph has one width")
        width = max(widths, default=0)
        if width > self.max_query_width:
            reasons.append(f"{width} queries a request; captured up to {self.max_query_width}")
        needed = GraphLevel.DECODE if mode.is_decode else GraphLevel.UNIFORM
        if level < needed:
            reasons.append(f"{mode.value} needs graph level {needed.name}; {self._backend.name} has {level.name}")
        if bucket_for(batch.batch_size, self.buckets) is None:
            reasons.append(f"{batch.batch_size} requests; the largest bucket is {self.buckets[-1]}")
        if batch.encoder_out_cache_loc is not None:
            reasons.append("encoder rows are written in this step; a graph's encoder keys are reused")
        info = batch.spec_info
        if info is not None and info.mask is not None and info.mask_row:
            reasons.append(f"a part of a batch, from row {info.mask_row} of its mask; a graph starts at 0")
        if batch.uses_graph_buffers:
            reasons.append("the batch is a graph's own view already")
        if mode.is_target_verify and batch.extend_seq_lens_cpu and not self._backend.supports_ragged_verify_graph:
            short = [n for n in batch.extend_seq_lens_cpu if n != width]
            if short:
                reasons.append(f"requests with {sorted(set(short))} of {width} drafts; {self._backend.name} cannot")
        if not reasons:
            captured = self._kinds.get(self._kind(batch))
            if captured is not None:
                reasons += _differences(captured, batch)
        return reasons

    def _idle_reasons(self, batch: ForwardBatch) -> list[str]:
        if not self._kinds:
            return ["an idle step replays padding of a captured kind, and none is captured yet"]
        rows = max(batch.num_tokens, batch.batch_size)
        fits = bucket_for(-(-rows // self._idle_kind().width), self.buckets)
        return [] if fits else [f"{rows} idle rows; the largest bucket is {self.buckets[-1]}"]

    def _idle_kind(self) -> Kind:
        return min(self._kinds, key=lambda kind: (not kind.mode.is_decode, kind.width))

    def _kind(self, batch: ForwardBatch) -> Kind:
        info = batch.spec_info if batch.forward_mode.is_target_verify else None
        mask = info.mask.buffer.data_ptr() if info is not None and info.mask is not None else None
        return Kind(batch.forward_mode, batch.query_lens_cpu[0], mask)

    def capture(self, inputs: Mapping[str, Tensor], batch: ForwardBatch) -> None:
        """Capture a step's kind in every bucket, unless it is captured.

        Args:
            inputs: The model's inputs of that step: names, dtypes and shapes are taken.
            batch: Any step of the kind; its values are not used.

        Raises:
            ContractViolation: The step cannot be captured; or the backend, or the model, does what a capture may not.
        """
        self._refuse(batch)
        kind = self._kind(batch)
        if kind in self._kinds:
            return
        glue = self._glue if not self.glue_refusal(kind.mode) else None
        self._kinds[kind] = CapturedSizes(kind, batch, inputs, self.buckets, self._runtime._replace(glue=glue))

    def run(self, inputs: Mapping[str, Tensor], batch: ForwardBatch) -> Tensor | tuple[Tensor, ...]:
        """Run a step from its graph.

        Args:
            inputs: By name, a row a token (or a request, as the options say), device; copied. Not read when idle.
            batch: The step, unpadded; an idle step replays the smallest bucket of padding.

        Returns:
            The model's outputs, the step's rows only; views of fixed memory that the next run overwrites.

        Raises:
            ContractViolation: ``can_run`` gives reasons; or the replay breaks the contract.
            BatchError: Inputs differ from those captured.
        """
        self._refuse(batch)
        if batch.forward_mode is ForwardMode.IDLE:
            kind = self._idle_kind()
            rows = -(-max(batch.num_tokens, batch.batch_size, 1) // kind.width)
        else:
            self.capture(inputs, batch)
            kind, rows = self._kind(batch), batch.batch_size
        bucket = bucket_for(rows, self.buckets)
        assert bucket is not None  # can_run has looked
        with torch.no_grad():
            return self._kinds[kind].replay(inputs, batch, bucket)

    def _refuse(self, batch: ForwardBatch) -> None:
        reasons = self.can_run(batch)
        if reasons:
            raise ContractViolation(
                "no graph can serve this step:\n  " + "\n  ".join(reasons),
                remedy="ask can_run first and run such steps eagerly",
            )


def _differences(captured: CapturedSizes, batch: ForwardBatch) -> list[str]:
    """Return what a step has that its kind was captured without, and the reverse."""
    template, found = captured.template, []
    for name in ("kv_loc_plan", "state", "encoder_lens"):
        had, has = getattr(template, name) is not None, getattr(batch, name) is not None
        if had != has:
            found.append(f"{name} {'given' if has else 'missing'}; captured {'with' if had else 'without'} it")
    if template.state is not None and batch.state is not None:
        had, has = template.state.track_slots is not None, batch.state.track_slots is not None
        if had != has:
            found.append(f"state tracking {'given' if has else 'missing'}; captured {'with' if had else 'without'} it")
    return found + captured.buffers.problems(batch)
