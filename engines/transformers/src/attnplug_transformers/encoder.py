"""Encoders alone: inputs of any lengths packed one after another, each row's hidden state back."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from attnplug.backend import AttentionBackend
from attnplug.context import ForwardContext, forward_context
from attnplug.errors import ConfigError, UnsupportedModel

from .adapters import find_adapter
from .backends import BackendFactory, ConfigSource, Selection, build_serving, check_placement, read_config, select
from .detokenize import Tokenizer
from .encoder_batch import make_encoder_batch
from .errors import RequestRefused
from .intake import Intake, several
from .loading import dtype_name, resolve_device, resolve_dtype
from .model_source import open_model
from .model_spec import model_spec_from_config, refuse_decoder
from .sizes import EngineSizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Encoder", "Encoding"]

_ROW_HEADS = ("Model", "ForMaskedLM", "ForTokenClassification")
"""Ends of the names of classes whose every output row is of one input row."""


class Encoding(NamedTuple):
    """What an encoder makes of one input of n tokens."""

    last_hidden_state: Tensor
    """[n, d], the model's dtype and device."""
    logits: Tensor | None
    """[n, classes or vocabulary]; None where the model has no head."""


class Encoder:
    """Serves a transformers encoder on attnplug backends: ragged batches, no padding, no KV pool.

    The model stays its owner's, as with ``Engine``. Calls from several threads take turns.

    Args:
        model: With its weights; a base model, or one with a head for each row (masked language model, token classes).
        tokenizer: For inputs given as texts.
        attention: A configuration, its tables, or its file; None: the configuration ladder.
        device: Where the model must be; its own device by default.
        dtype: What the model must have; its own dtype by default.
        max_batch_size: Most inputs of a step.
        max_num_tokens: Most tokens of a step, and so of an input.
        backend_factory: Builds the backend in place of the configuration.
        check_batches: Check the values of each step's batch too, which synchronises.

    Raises:
        AttnplugError: The model cannot be served, no backend fits it, or an argument is wrong.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer | None = None,
        *,
        attention: ConfigSource = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        max_batch_size: int = 64,
        max_num_tokens: int = 8192,
        backend_factory: BackendFactory | None = None,
        check_batches: bool = False,
        selection: Selection | None = None,
    ) -> None:
        check_placement(model, device, dtype)
        if not type(model).__name__.endswith(_ROW_HEADS):
            raise UnsupportedModel(
                f"{type(model).__name__} reads more than one row of its encoder at a time, and inputs are packed",
                remedy=f"serve its base model, or a class whose name ends with {', '.join(_ROW_HEADS[1:])}",
            )
        self.model, self.tokenizer, self.device = model, tokenizer, model.device
        self.model_spec = model_spec_from_config(model.config, dtype=dtype_name(model.dtype))
        refuse_decoder(self.model_spec)
        adapter = find_adapter(model.config.model_type, self.model_spec)
        if selection is None:
            selection = select(self.model_spec, read_config(attention), self.device, backend_factory)
        self.decision = selection.decision
        if not all(isinstance(size, int) and size >= 1 for size in (max_batch_size, max_num_tokens)):
            raise ConfigError(
                f"max_batch_size is {max_batch_size!r}, max_num_tokens {max_num_tokens!r}; allowed: at least 1",
                key="encoder",
            )
        self.sizes = EngineSizes(
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            chunk_size=max_num_tokens,
            max_context_len=min(self.model_spec.max_context_len, max_num_tokens),
            page_size=selection.page_size,
            num_pages=1,  # No layer stores anything.
        )
        layers = adapter.make_layers(model, self.model_spec)
        model.train(False)
        self._serving = build_serving(
            self.model_spec,
            adapter,
            selection,
            self.sizes,
            dtype=model.dtype,
            device=self.device,
            factory=backend_factory,
        )
        self.backend: AttentionBackend = self._serving.backend
        self._bridge = adapter.make_bridge(model, layers, self._serving, self.sizes)
        self._intake = Intake(model, tokenizer, self.sizes)
        self._check_batches = check_batches
        self._context, self._lock = ForwardContext(self.backend), threading.RLock()

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | os.PathLike[str],
        *,
        attention: ConfigSource = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        max_batch_size: int = 64,
        max_num_tokens: int = 8192,
        backend_factory: BackendFactory | None = None,
        check_batches: bool = False,
    ) -> Encoder:
        """Load an encoder with its tokenizer; what no installed backend can serve is refused before that.

        Args:
            path_or_id: A folder, or a Hub id.
            attention: See ``Encoder``, as for all below.
            device: Where it goes; the best device of this machine by default.
            dtype: What it computes in; "auto": float32 on a CPU, elsewhere as stored.
            max_batch_size: Most inputs of a step.
            max_num_tokens: Most tokens of a step.
            backend_factory: Builds the backend in place of the configuration.
            check_batches: Check the values of each step's batch too.

        Raises:
            AttnplugError: The model cannot be found, loaded or served, or an argument is wrong.
        """
        where, source = resolve_device(device), open_model(os.fspath(path_or_id))
        wanted = resolve_dtype(dtype, where, source.stored_dtype())
        spec = source.model_spec(dtype_name(wanted))
        refuse_decoder(spec)
        find_adapter(source.config().model_type, spec)  # As select, it refuses before any weight is read.
        selection = select(spec, read_config(attention), where, backend_factory)
        loaded = source.load(dtype=wanted, device=where)
        return cls(
            loaded.model,
            cast("Tokenizer | None", loaded.tokenizer),
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            backend_factory=backend_factory,
            check_batches=check_batches,
            selection=selection,
        )

    def encode(self, inputs: Sequence[str | Sequence[int]]) -> list[Encoding]:
        """Encode texts, or lists of token ids, in as few steps as their lengths allow.

        Returns:
            One encoding an input, in their order.

        Raises:
            RequestRefused: Inputs that can never be served, all named; nothing has run then.
        """
        tokens = self._read(several(inputs, "inputs"))
        with self._lock:
            return [encoding for part in self._steps(tokens) for encoding in self._run(part)]

    def _read(self, inputs: Sequence[str | Sequence[int]]) -> list[tuple[int, ...]]:
        read, problems = [], dict[int, tuple[str, ...]]()
        for place, one in enumerate(inputs):
            tokens, faults = self._intake.encode(one)
            faults = faults or self._intake.token_faults(tokens)
            if len(tokens) > self.sizes.max_context_len:
                faults.append(f"{len(tokens)} tokens; allowed: at most {self.sizes.max_context_len}")
            if faults:
                problems[place] = tuple(faults)
            read.append(tokens)
        if problems:
            raise RequestRefused(problems, remedy="shorten or correct these inputs")
        return read

    def _steps(self, inputs: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        part: list[tuple[int, ...]] = []
        for one in inputs:
            full = sum(map(len, part)) + len(one) > self.sizes.max_num_tokens
            if part and (full or len(part) == self.sizes.max_batch_size):
                yield part
                part = []
            part.append(one)
        if part:
            yield part

    def _run(self, inputs: list[tuple[int, ...]]) -> list[Encoding]:
        lens = [len(one) for one in inputs]
        batch = make_encoder_batch(lens, self._serving.translator, self.device)
        if self._check_batches:
            batch.validate_values(num_slots=self._serving.pool.num_slots)
        ids = torch.tensor([[token for one in inputs for token in one]], device=self.device)
        # A head's output does not hold what it was made of.
        hidden: list[Tensor] = []
        base: Any = self.model.base_model
        hook = base.register_forward_hook(lambda _module, _args, output: hidden.append(output.last_hidden_state[0]))
        try:
            with torch.inference_mode(), self._bridge.serve(batch), forward_context(self._context):
                self.backend.init_forward_metadata(batch)
                output = self.model(input_ids=ids, position_ids=batch.positions.unsqueeze(0))
        finally:
            hook.remove()
        logits: Tensor | None = getattr(output, "logits", None)
        states = torch.split(hidden[0], lens)
        scores = [None] * len(lens) if logits is None else torch.split(logits[0], lens)
        return [Encoding(one, score) for one, score in zip(states, scores, strict=True)]

    def close(self) -> None:
        """Give back the backend's workspaces."""
        with self._lock:
            self.backend.close()

    def __enter__(self) -> Encoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
