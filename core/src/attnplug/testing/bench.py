"""Run steps of a case on a backend under watch: who served, what was written, and whether the result is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..attention_io import AttentionOutput
from ..context import ForwardContext, forward_context
from ..masks.verify import TreeMaskMode, VerifyMask
from .case import Case
from .compare import check_output
from .expected import expect
from .monitor import PoolWatch, Untouched
from .poison import nan_empty
from .results import Failure
from .step import LayerInputs, Span, Step, fill_mask, layer_inputs, make_step
from .subject import Built, Subject
from .trees import draw_trees
from .world import World


class Bench:
    """A case's world with the subject built in it.

    Args:
        subject: The backend under test.
        case: What to build.
        deterministic: Ask for batch-invariant results.
        world: An existing world; made from the case by default.
    """

    def __init__(
        self, subject: Subject, case: Case, *, deterministic: bool = False, world: World | None = None
    ) -> None:
        self.subject, self.case = subject, case
        self.world = World(case, subject.device, deterministic=deterministic) if world is None else world
        self.built: Built = subject.build(self.world.env, case.wrap)
        self.served_by = ""

    @property
    def backend(self) -> Any:
        """The backend, inside its wrapper where the case names one."""
        return self.built.root

    def step(self, **changes: Any) -> Step:
        """Build the case's step, or another over the same world; see ``make_step``. A tree case fills the mask."""
        mode = changes.get("mode", self.case.mode)
        if mode.is_target_verify and self.case.mask and "trees" not in changes:
            changes |= self._tree()
        step = make_step(self.world, **changes)
        if step.batch.spec_info is not None and step.batch.spec_info.mask is not None:
            self.backend.update_verify_buffers_to_fill_after_draft(step.batch.spec_info, step.batch.batch_size)
        return step

    def refill(self, step: Step, trees: Sequence[Tensor]) -> Step:
        """Write other trees into a step's mask, as drafting does after planning, and tell the backend."""
        info = step.batch.spec_info
        assert info is not None, "only a verify step has a mask"
        assert info.mask is not None, "a chain has no mask"
        fill_mask(info.mask, step.batch.seq_lens, trees)
        self.backend.update_verify_buffers_to_fill_after_draft(info, step.batch.batch_size)
        return Step(step.mode, step.spans, step.batch, tuple(trees), step.brings_encoder)

    def pad(self, step: Step, count: int) -> Step:
        """Return a step with padding requests, as a graph runner pads it."""
        batch = step.batch.pad(
            step.batch.batch_size + count,
            seq_len_fill=self.backend.get_cuda_graph_seq_len_fill_value(),
            sink_slot=self.world.pool.sink_slot,
        )
        return Step(step.mode, step.spans, batch, step.trees, step.brings_encoder)

    def run(
        self,
        step: Step,
        *,
        layers: Sequence[int] | None = None,
        lse: bool = False,
        save: bool = True,
        plan: bool = True,
    ) -> list[AttentionOutput]:
        """Run layers of a step under watch, and return their results, cloned.

        Args:
            step: The step.
            layers: Which layers, in this order; all by default.
            lse: Ask for the LSE.
            save: Whether keys and values are stored.
            plan: Compile metadata first; False where the step's metadata is in force.
        """
        world, outputs = self.world, []
        order = range(len(world.layers)) if layers is None else layers
        inputs = {index: layer_inputs(world, step, index, lse=lse) for index in order}
        kept = Untouched(batch=step.batch, inputs=list(inputs.values()), req_to_token=world.table)
        if plan:
            watch = PoolWatch(world)
            with nan_empty():
                self.backend.init_forward_metadata(step.batch)
            self.synchronise()
            watch.verify(step, None, saved=False)
        for index in order:
            watch = PoolWatch(world)
            outputs.append(self.call(step, index, inputs[index], save=save))
            # The chunked-prefix form reads what it is given, and its rows are stored already.
            stores = save and world.layers[index] is not None and self.case.mla != "chunked_prefix"
            watch.verify(step, index if world.case.layers[index].reads_pool else None, saved=stores)
        kept.verify()
        return outputs

    def call(self, step: Step, index: int, inputs: LayerInputs, *, save: bool = True) -> AttentionOutput:
        """Run one layer as a model does, and check who served it."""
        layer, before = self.world.layers[index], self.built.served()
        with forward_context(ForwardContext(self.backend)), nan_empty():
            got = layer(inputs.q, inputs.k, inputs.v, step.batch, save, inputs.extras)
        self.synchronise()
        if not isinstance(got, AttentionOutput):
            raise Failure(f"forward returned a {type(got).__name__}; must be an AttentionOutput", fault="wrong result")
        self.served_by = self.built.check_served(layer.layer_id, step.mode, before)
        return AttentionOutput(got.out.clone(), None if got.lse is None else got.lse.clone(), got.aux)

    def check(
        self,
        step: Step,
        outputs: Sequence[AttentionOutput],
        *,
        layers: Sequence[int] | None = None,
        lse: bool = False,
    ) -> None:
        """Raise Failure where a result is not the oracle's."""
        order = range(len(self.world.layers)) if layers is None else layers
        for index, got in zip(order, outputs, strict=True):
            check_output(self.world, step, index, got, expect(self.world, step, index, lse=lse), lse=lse)

    def prove(self, step: Step | None = None, **options: Any) -> list[AttentionOutput]:
        """Run a step, the case's own by default, and check it against the oracle."""
        step = self.step() if step is None else step
        options.setdefault("lse", self.case.lse)
        options.setdefault("save", self.case.save)
        outputs = self.run(step, **options)
        self.check(step, outputs, layers=options.get("layers"), lse=options["lse"])
        return outputs

    def spans(self, *spans: tuple[int, int, int]) -> tuple[Span, ...]:
        """Return spans from plain triples."""
        return tuple(Span(*span) for span in spans)

    def synchronise(self) -> None:
        """Wait for the device, so that what is read is what was computed, and a fault is this call's."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)

    def close(self) -> None:
        """Give the backend's workspaces back."""
        self.backend.close()

    def _tree(self) -> dict[str, Any]:
        width = self.case.queries[0]
        trees, parents = draw_trees(self.case, self.world.device)
        mask = self.backend.verify_mask
        mode = TreeMaskMode.FULL_MASK if self.case.mask == "full" else TreeMaskMode.QLEN_ONLY
        if mask is None or mask.draft_token_num != width:
            # The backend's mask is for its own width or is not there; an engine allocates one, in the asked layout.
            mask = VerifyMask.allocate(
                mode,
                max_bs=len(self.case.queries) + self.case.pad,
                draft_token_num=width,
                max_context_len=self.world.env.limits.max_context_len,
                device=self.world.device,
            )
        if not mask.is_read:
            raise Failure("CUSTOM_MASK is declared, but verify_mask.is_read is False", fault="tree ignored")
        return {"mask": mask, "trees": trees, "parents": parents}
