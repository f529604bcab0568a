"""One forward of the model for one step."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnplug.backend import AttentionBackend
from attnplug.batch import ForwardBatch
from attnplug.context import ForwardContext, forward_context
from attnplug.graphs.overlap import ReadEndFence
from attnplug.modes import SharedReadEnds

from .adapters.base import Bridge
from .batch_builder import StepInputs
from .step_graphs import StepGraphs

__all__ = ["ModelRunner"]


class ModelRunner:
    """Runs a model with its attention served by a backend: from a graph where one serves the step, else eagerly.

    Args:
        model: In evaluation mode.
        bridge: Lends it the backend.
        backend: Serves all its layers.
        fence: Told where each step's shared reads end; None without overlap scheduling.
    """

    graphs: StepGraphs | None = None
    """Set by the engine, whose graphs call ``decode``."""

    def __init__(
        self, model: PreTrainedModel, bridge: Bridge, backend: AttentionBackend, fence: ReadEndFence | None = None
    ) -> None:
        self.model, self.bridge, self.backend, self._fence = model, bridge, backend, fence
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def run(self, inputs: StepInputs) -> Tensor:
        """Return the logits of the rows after which a token is chosen.

        Returns:
            [n, vocabulary] in the model's dtype, device; a graph's own memory, perhaps, which the next run overwrites.

        Raises:
            UnsupportedModel: In the first step: a module's attention is not what its layer says, or did not come here.
        """
        with torch.inference_mode():
            # In a decode step every row is sampled, in order, so a replay's logits are those asked for.
            logits = None if self.graphs is None else self.graphs.run(inputs)
            return self._eager(inputs) if logits is None else logits

    def decode(self, input_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Run the model over a decode step whose metadata is made, with fixed shapes alone: what a graph captures.

        Args:
            input_ids: [T] int64, device.
            batch: The step, published as the forward context's.

        Returns:
            The logits of every row, [T, vocabulary].
        """
        step = StepInputs(batch, input_ids, logits_rows=input_ids[:0])
        with self.bridge.serve(batch):
            logits: Tensor = self.model(**self.bridge.inputs(step)).logits[0]
            return logits

    def _eager(self, inputs: StepInputs) -> Tensor:
        batch, fence = inputs.batch, self._fence
        keep = {"logits_to_keep": inputs.logits_rows} if self._keeps_logits else {}
        with self.bridge.serve(batch), forward_context(ForwardContext(self.backend, batch=batch)):
            if inputs.encoder is not None:
                self.backend.init_forward_metadata(inputs.encoder.batch)
                self.bridge.encode(inputs.encoder)
            if fence is not None:
                fence.arm_eager(self.backend.shared_read_ends(batch.forward_mode))
            self.backend.init_forward_metadata(batch)
            if fence is not None:
                fence.reached(SharedReadEnds.PRE_REPLAY)
                fence.reached(SharedReadEnds.IN_REPLAY)
            logits: Tensor = self.model(**self.bridge.inputs(inputs), **keep).logits[0]
            if fence is not None:
                fence.reached(SharedReadEnds.POST_REPLAY)
            return logits if self._keeps_logits else logits[inputs.logits_rows]
