"""One forward of the model for one step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnplug.backend import AttentionBackend
from attnplug.context import ForwardContext, forward_context
from attnplug.errors import UnsupportedModel
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
        self._layers, self._checked = layers, False
        self._loan = ModelLoan(model)
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
        step = AttentionStep(batch, self._layers, None if self._checked else [])
        keep = {"logits_to_keep": inputs.logits_rows} if self._keeps_logits else {}
        with torch.inference_mode(), self._loan(), attention_step(step), forward_context(self._context):
            self.backend.init_forward_metadata(batch)
            output = self.model(
                input_ids=inputs.input_ids.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                **keep,
            )
            if step.seen is not None:
                self._check_first(step.seen)
            logits: Tensor = output.logits[0]
            return logits if self._keeps_logits else logits[inputs.logits_rows]

    def _check_first(self, seen: list[nn.Module]) -> None:
        silent = [layer.layer_id for module, layer in self._layers.items() if module not in seen]
        if silent:
            raise UnsupportedModel(
                f"{type(self.model).__name__} computed attention by itself in layers {silent}, not by transformers' "
                "AttentionInterface",
                remedy="serve a model whose every layer takes its attention from there",
            )
        self._checked = True
