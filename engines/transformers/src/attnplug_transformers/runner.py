"""One forward of the model for one step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnplug.backend import AttentionBackend
from attnplug.context import ForwardContext, forward_context
from attnplug.layer import AttentionLayer

from .attention import AttentionStep, ModelLoan, attention_step
from .batch_builder import StepInputs

__all__ = ["ModelRunner"]


class ModelRunner:
    """Runs a model with its attention served by a backend.

    Args:
        model: In evaluation mode.
        layers: The layer of each of its attention modules.
        backend: Serves them all.
    """

    def __init__(
        self, model: PreTrainedModel, layers: Mapping[nn.Module, AttentionLayer], backend: AttentionBackend
    ) -> None:
        self.model, self.backend = model, backend
        self._layers, self._unchecked = layers, set(layers)
        self._loan = ModelLoan(model)
        self._context = ForwardContext(backend)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def run(self, inputs: StepInputs) -> Tensor:
        """Return the logits of the rows after which a token is chosen.

        Returns:
            [n, vocabulary] in the model's dtype, device.
        """
        batch = inputs.batch
        step = AttentionStep(batch, self._layers, self._unchecked)
        keep = {"logits_to_keep": inputs.logits_rows} if self._keeps_logits else {}
        with torch.inference_mode(), self._loan(), attention_step(step), forward_context(self._context):
            self.backend.init_forward_metadata(batch)
            output = self.model(
                input_ids=inputs.input_ids.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                **keep,
            )
            logits: Tensor = output.logits[0]
            return logits if self._keeps_logits else logits[inputs.logits_rows]
