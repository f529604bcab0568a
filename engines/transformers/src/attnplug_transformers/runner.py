"""One forward of the model for one step."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnplug.backend import AttentionBackend
from attnplug.context import ForwardContext, forward_context

from .adapters.base import Bridge
from .batch_builder import StepInputs

__all__ = ["ModelRunner"]


class ModelRunner:
    """Runs a model with its attention served by a backend.

    Args:
        model: In evaluation mode.
        bridge: Lends it the backend.
        backend: Serves all its layers.
    """

    def __init__(self, model: PreTrainedModel, bridge: Bridge, backend: AttentionBackend) -> None:
        self.model, self.bridge, self.backend = model, bridge, backend
        self._context = ForwardContext(backend)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def run(self, inputs: StepInputs) -> Tensor:
        """Return the logits of the rows after which a token is chosen.

        Returns:
            [n, vocabulary] in the model's dtype, device.

        Raises:
            UnsupportedModel: In the first step: a module's attention is not what its layer says, or did not come here.
        """
        batch = inputs.batch
        keep = {"logits_to_keep": inputs.logits_rows} if self._keeps_logits else {}
        with torch.inference_mode(), self.bridge.serve(batch), forward_context(self._context):
            if inputs.encoder is not None:
                self.backend.init_forward_metadata(inputs.encoder.batch)
                self.bridge.encode(inputs.encoder)
            self.backend.init_forward_metadata(batch)
            output = self.model(**self.bridge.inputs(inputs), **keep)
            logits: Tensor = output.logits[0]
            return logits if self._keeps_logits else logits[inputs.logits_rows]
