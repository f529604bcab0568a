"""Steps of a case run from graphs: what the model of one attention call a layer gives, replayed, against the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..attention_io import AttentionOutput
from ..batch import ForwardBatch
from ..context import ForwardContext, forward_context
from ..graphs.breakable import BreakableGraphRunner
from ..graphs.buckets import bucket_for
from ..graphs.full import GraphRunner
from ..graphs.options import EVERY_REPLAY, GraphOptions
from ..graphs.overlap import ReadEndFence
from ..graphs.pointers import metadata_tensors
from ..masks.verify import TreeMaskMode, VerifyMask
from .bench import Bench
from .case import Case
from .monitor import PoolWatch, same_bytes, take
from .results import Failure
from .step import Span, Step, layer_inputs
from .subject import Subject
from .trees import draw_trees

BUCKETS = (1, 2, 4)
PIECES = (8, 32)


class GraphBench(Bench):
    """A case's world whose steps are replayed.

    Args:
        subject: The backend under test.
        case: What to build; its requests' queries are spread over several steps.
        fence: Told where each step's shared reads end.
    """

    def __init__(self, subject: Subject, case: Case, *, fence: ReadEndFence | None = None) -> None:
        super().__init__(subject, case)
        self.fence = fence
        self._mask: VerifyMask | None = None
        self._trees_drawn = 0
        self.runner = self.new_runner()

    def new_runner(self, **options: Any) -> GraphRunner | BreakableGraphRunner:
        """Return a runner that has captured nothing yet."""
        device, mode = self.world.device, self.case.mode
        chosen = GraphOptions(pointer_checks=EVERY_REPLAY, strict=device.type == "cuda", **options)
        if mode.is_extend:
            return BreakableGraphRunner(
                self.model,
                self.backend,
                buckets=PIECES,
                max_requests=len(self.case.queries),
                device=device,
                options=chosen,
                fence=self.fence,
            )
        width = step_width(self.case)
        return GraphRunner(
            self.model,
            self.backend,
            buckets=BUCKETS,
            device=device,
            max_query_width=width,
            options=chosen,
            fence=self.fence,
        )

    def model(self, inputs: Mapping[str, Tensor], batch: ForwardBatch) -> tuple[Tensor, ...]:
        """Call each layer once; nothing passes from one to the next, so that each is judged alone."""
        rows = batch.num_tokens
        return tuple(
            layer(inputs[f"q{i}"], inputs[f"k{i}"], inputs[f"v{i}"], batch).out.reshape(rows, -1)
            for i, layer in enumerate(self.world.layers)
        )

    def inputs(self, step: Step) -> dict[str, Tensor]:
        """Return the model's inputs of a step, by name."""
        named: dict[str, Tensor] = {}
        for i in range(len(self.world.layers)):
            one = layer_inputs(self.world, step, i)
            assert one.k is not None
            assert one.v is not None
            named |= {f"q{i}": one.q, f"k{i}": one.k, f"v{i}": one.v}
        return named

    def tree(self, spans: Sequence[Span]) -> dict[str, Any]:
        """Return what ``step`` takes for a tree over these spans: new trees at each call, in one mask for all."""
        width, device = step_width(self.case), self.world.device
        if self._mask is None:
            full = self.case.mask == "full"
            offered = self.backend.verify_mask
            if offered is not None and offered.draft_token_num == width and offered.fits(max(BUCKETS)):
                self._mask = offered
            else:
                self._mask = VerifyMask.allocate(
                    TreeMaskMode.FULL_MASK if full else TreeMaskMode.QLEN_ONLY,
                    max_bs=max(BUCKETS),
                    draft_token_num=width,
                    max_context_len=self.world.env.limits.max_context_len,
                    device=device,
                )
        self._trees_drawn += 1
        drawn = self.case.replace(
            queries=(width,) * len(spans),
            prefix=tuple(span.start for span in spans),
            seed=self.case.seed + self._trees_drawn,
        )
        trees, parents = draw_trees(drawn, device)
        return {"mask": self._mask, "trees": trees, "parents": parents}

    def capture(self, step: Step) -> None:
        """Capture a step's kind; only the sink may be written meanwhile, and the subject must serve it."""
        served = self.built.served()
        before = [self._but_sink(buffer) for buffer in self._buffers()]
        self.runner.capture(self.inputs(step), step.batch)
        self.synchronise()
        self.served_by = self.built.check_served(self.world.layers[0].layer_id, step.mode, served)
        if not all(same_bytes(old, self._but_sink(new)) for old, new in zip(before, self._buffers(), strict=True)):
            raise Failure(
                "warm-up or capture wrote slots other than the sink's: a write target was left from an earlier step",
                fault="stale write slots at capture",
            )

    def _but_sink(self, buffer: Tensor) -> Tensor:
        slots = torch.arange(self.world.pool.num_slots, device=buffer.device)
        return take(self.world, buffer, slots[slots != self.world.pool.sink_slot])

    def replay(self, step: Step) -> tuple[Tensor, ...]:
        """Run a step from its graph and return each layer's rows: views that the next replay overwrites."""
        outputs = self.runner.run(self.inputs(step), step.batch)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def prove_replay(self, step: Step) -> None:
        """Replay a step under watch and hold it against the oracle; name what was stale where it is wrong."""
        watch = PoolWatch(self.world)
        padded = self.padded(step)
        outputs = [AttentionOutput(out.clone()) for out in self.replay(step)]
        self.synchronise()
        # Writes first: what a padding row destroyed makes outputs wrong too, and says less.
        if len(self.world.layers) == 1:
            try:
                watch.verify(padded, 0, saved=True)
            except Failure as failure:
                if not padded.batch.num_padding:
                    raise
                raise Failure(
                    f"{failure}; the replay had {padded.batch.num_padding} padding requests",
                    fault="padding rows not reset",
                ) from failure
        try:
            self.check(step, outputs)
        except Failure as failure:
            raise self._stale(padded, failure) from failure

    def padded(self, step: Step) -> Step:
        """Return the step as the graph runs it."""
        if self.case.mode.is_extend:
            # The tail of a prefill's bucket writes the sink, as a padding request does.
            return step
        bucket = bucket_for(step.batch.batch_size, BUCKETS)
        assert bucket is not None, "a case has no more requests than the largest bucket"
        return self.pad(step, bucket - step.batch.batch_size)

    def _unlike_eager(self, step: Step) -> tuple[list[str], list[str]]:
        """Return the fields that differ from an eager step's, and those of them that share their memory with another.

        Layer groups may share what an eager step shares too; what only the replay shares was overwritten.
        """
        now = metadata_tensors(self.backend)
        places = {path: t.data_ptr() for path, t in now.items() if t.numel()}
        now = {path: t.clone() for path, t in now.items()}
        with forward_context(ForwardContext(self.backend, batch=step.batch)):
            self.backend.init_forward_metadata(step.batch)
        self.synchronise()
        eager = metadata_tensors(self.backend)
        differing = [
            path
            for path, t in now.items()
            if path in eager and eager[path].shape == t.shape and not _same(eager[path], t)
        ]
        shared = [
            path
            for path in differing
            if any(
                place == places.get(path) and other in eager and eager[other].data_ptr() != eager[path].data_ptr()
                for other, place in places.items()
                if other != path
            )
        ]
        return differing, shared

    def _stale(self, step: Step, failure: Failure) -> Failure:
        fields, shared = self._unlike_eager(step)
        if shared and len(self.world.layers) > 1:
            return Failure(
                f"{failure}; the replay keeps {', '.join(shared)} where it keeps another layer group's, which was "
                "written later, and an eager step keeps them apart",
                fault=f"layer groups share a graph buffer: {shared[0].rpartition('.')[2]}",
            )
        if not fields:
            return self._beside_eager(step, failure)
        return Failure(
            f"{failure}; the replay's metadata differs from an eager step's in {', '.join(fields)}",
            fault=f"metadata not refreshed: {fields[0].rpartition('.')[2]}",
        )

    def _beside_eager(self, step: Step, failure: Failure) -> Failure:
        """Return a replay's failure, which is the graph's own where the same step is right when it runs eagerly."""
        try:
            self.prove(step)
        except Failure:
            return failure
        return Failure(f"{failure}; run eagerly, the same step is right", fault="replay differs from eager")

    def _buffers(self) -> Sequence[Tensor]:
        count = range(len(self.world.layers))
        return [buffer for i in count if self.case.layers[i].reads_pool for buffer in self.world.stored(i)]


def step_width(case: Case) -> int:
    """Return the query width of a graph case's steps: its ``arg``, 1 by default."""
    return int(case.arg or 1)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
