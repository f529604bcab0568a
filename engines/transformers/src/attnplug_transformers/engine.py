"""The engine: requests in, tokens out, one step of the model at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, cast

import torch

from attnplug.backend import AttentionBackend

from .adapters import find_adapter
from .backends import (
    BackendFactory,
    ConfigSource,
    Selection,
    build_serving,
    check_placement,
    read_config,
    select,
    serves_mixed,
)
from .batch_builder import BatchBuilder
from .core import EngineCore
from .detokenize import Tokenizer
from .encoder_intake import EncoderIntake
from .encoder_room import EncoderRoom
from .intake import Intake
from .loading import dtype_name, resolve_device, resolve_dtype
from .loop import RequestLoop
from .model_source import open_model
from .model_spec import encoder_len_of, model_spec_from_config, refuse_encoder, refuse_headless
from .overlap import read_end_fence
from .pages import PageAllocator
from .runner import ModelRunner
from .scheduler import Scheduler, SchedulerLimits
from .sizes import choose_sizes
from .step_graphs import StepGraphs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from attnplug.decision import Decision

__all__ = ["Engine"]


class Engine(RequestLoop):
    """Serves a transformers model on attnplug backends: continuous batching over a paged KV pool.

    The model stays its owner's: between steps it computes attention as it did before. It is put in evaluation mode. One
    step runs at a time; calls from several threads take turns.

    Args:
        model: A causal language model of transformers, or an encoder-decoder, with its weights. Its generation config
            gives the end tokens, and those that a decoder after an encoder begins with, alone: how tokens are chosen is
            each call's to say.
        tokenizer: For prompts given as texts, for ``Completion.text``, and for stop strings.
        attention: A configuration, its tables, or its file; None: the configuration ladder.
        device: Where the model must be; its own device by default.
        dtype: What the model must have; its own dtype by default.
        decision: What another rank decided, as ``attnplug.lock.load_lock`` reads it, in place of choosing here; a
            configuration beside it gives options only.
        page_size: Tokens a page; the configuration's by default.
        max_batch_size: Most requests that run at once.
        max_num_tokens: Most tokens of a step.
        chunk_size: Most prompt tokens of a step, by which long prompts let others go on; max_num_tokens by default.
        max_context_len: Most tokens of prompt and completion together; the model's by default.
        num_pages: Size of the KV pool.
        num_encoder_pages: The same of the encoder space, where a decoder reads an encoder.
        kv_cache_bytes: Both, in bytes; by default 2 GiB on a CPU, and 80 % of what is free on a GPU.
        backend_factory: Builds the backend in place of the configuration, for backends made by hand.
        check_batches: Check the values of each step's batch too, which synchronises.
        graphs: "auto", "off" or "emulated", see ``step_graphs.GraphChoice``; the configuration's by default.
        graph_buckets: Batch sizes to capture; the configuration's by default, and without one those of
            ``attnplug.graphs.buckets.batch_buckets``.
        overlap: Prepare a step while the one before runs; by default on a GPU where every backend says when it has read
            what the preparation overwrites. Tokens are the same with and without.

    Raises:
        AttnplugError: The model cannot be served, no backend fits it, or an argument is wrong.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer | None = None,
        *,
        attention: ConfigSource = None,
        decision: Decision | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        page_size: int | None = None,
        max_batch_size: int = 32,
        max_num_tokens: int = 2048,
        chunk_size: int | None = None,
        max_context_len: int | None = None,
        num_pages: int | None = None,
        num_encoder_pages: int | None = None,
        kv_cache_bytes: int | None = None,
        backend_factory: BackendFactory | None = None,
        check_batches: bool = False,
        graphs: str | None = None,
        graph_buckets: Sequence[int] | None = None,
        overlap: bool | None = None,
        selection: Selection | None = None,
    ) -> None:
        check_placement(model, device, dtype)
        self.model = model
        self.device, self.dtype = model.device, model.dtype
        self.model_spec = model_spec_from_config(model.config, dtype=dtype_name(self.dtype))
        refuse_encoder(self.model_spec)
        refuse_headless(model)
        adapter = find_adapter(model.config.model_type, self.model_spec)
        if selection is None:
            config = read_config(attention, page_size=page_size)
            selection = select(self.model_spec, config, self.device, backend_factory, decision)
        self.config, self.decision = selection.config, selection.decision
        self.sizes = choose_sizes(
            self.model_spec,
            page_size=selection.page_size,
            kv_dtype=selection.kv_dtype,
            device=self.device,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            chunk_size=chunk_size,
            max_context_len=max_context_len,
            num_pages=num_pages,
            kv_cache_bytes=kv_cache_bytes,
            max_encoder_len=encoder_len_of(model.config),
            num_encoder_pages=num_encoder_pages,
        )
        layers = adapter.make_layers(model, self.model_spec)
        model.train(False)
        serving = build_serving(
            self.model_spec,
            adapter,
            selection,
            self.sizes,
            dtype=self.dtype,
            device=self.device,
            factory=backend_factory,
        )
        self.backend: AttentionBackend = serving.backend
        bridge = adapter.make_bridge(model, layers, serving, self.sizes)
        self.pages = PageAllocator(self.sizes.num_pages, self.sizes.page_size)
        limits = SchedulerLimits(
            max_batch_size=self.sizes.max_batch_size,
            max_num_tokens=self.sizes.max_num_tokens,
            chunk_size=self.sizes.chunk_size,
            mixed=bridge.mixes and serves_mixed(self.backend, self.model_spec),
        )
        room, intake = None, Intake(model, tokenizer, self.sizes)
        if serving.encoder_table is not None:
            pages = PageAllocator(self.sizes.num_encoder_pages, self.sizes.page_size)
            room = EncoderRoom(pages, serving.encoder_table, self.sizes.max_encoder_rows)
            intake = EncoderIntake(model, tokenizer, self.sizes, adapter.feature_shape(model))
        self.encoder_pages = None if room is None else room.pages
        self.scheduler = Scheduler(limits, self.pages, serving.table, room)
        fence = read_end_fence(self.backend, self.device, overlap)
        runner = ModelRunner(model, bridge, self.backend, fence)
        attention_table = self.config.attention
        self.graphs = runner.graphs = StepGraphs(
            runner.decode,
            self.backend,
            choice=attention_table.graphs if graphs is None else graphs,
            device=self.device,
            max_batch_size=self.sizes.max_batch_size,
            buckets=attention_table.graph_buckets if graph_buckets is None else graph_buckets,
            fence=fence,
        )
        core = EngineCore(
            self.scheduler,
            BatchBuilder(serving.table, serving.translator, self.device, serving.encoder_table),
            runner,
            num_slots=serving.pool.num_slots if check_batches else None,
            fence=fence,
        )
        super().__init__(core, intake, tokenizer)

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | os.PathLike[str],
        *,
        attention: ConfigSource = None,
        decision: Decision | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        page_size: int | None = None,
        max_batch_size: int = 32,
        max_num_tokens: int = 2048,
        chunk_size: int | None = None,
        max_context_len: int | None = None,
        num_pages: int | None = None,
        num_encoder_pages: int | None = None,
        kv_cache_bytes: int | None = None,
        backend_factory: BackendFactory | None = None,
        check_batches: bool = False,
        graphs: str | None = None,
        graph_buckets: Sequence[int] | None = None,
        overlap: bool | None = None,
    ) -> Engine:
        """Load a model with its tokenizer and serve it; what no installed backend can serve is refused before that.

        Args:
            path_or_id: A folder, a ``.gguf`` file, a packaged model or a Hub id; see ``loading.load_model``.
            attention: See ``Engine``, as for all below.
            device: Where it goes; the best device of this machine by default.
            dtype: What it computes in; "auto": float32 on a CPU, elsewhere as stored.
            decision: What another rank decided.
            page_size: Tokens a page.
            max_batch_size: Most requests that run at once.
            max_num_tokens: Most tokens of a step.
            chunk_size: Most prompt tokens of a step.
            max_context_len: Most tokens of prompt and completion together.
            num_pages: Size of the KV pool.
            num_encoder_pages: The same of the encoder space.
            kv_cache_bytes: Both, in bytes.
            backend_factory: Builds the backend in place of the configuration.
            check_batches: Check the values of each step's batch too.
            graphs: "auto", "off" or "emulated".
            graph_buckets: Batch sizes to capture.
            overlap: Prepare a step while the one before runs.

        Raises:
            AttnplugError: The model cannot be found, loaded or served, or an argument is wrong.
        """
        config = read_config(attention, page_size=page_size)
        where = resolve_device(device)
        source = open_model(os.fspath(path_or_id))
        wanted = resolve_dtype(dtype, where, source.stored_dtype())
        spec = source.model_spec(dtype_name(wanted))
        refuse_encoder(spec)
        find_adapter(source.config().model_type, spec)  # As select, it refuses before any weight is read.
        selection = select(spec, config, where, backend_factory, decision)
        loaded = source.load(dtype=wanted, device=where)
        return cls(
            loaded.model,
            cast("Tokenizer | None", loaded.tokenizer),
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            chunk_size=chunk_size,
            max_context_len=max_context_len,
            num_pages=num_pages,
            num_encoder_pages=num_encoder_pages,
            kv_cache_bytes=kv_cache_bytes,
            backend_factory=backend_factory,
            check_batches=check_batches,
            graphs=graphs,
            graph_buckets=graph_buckets,
            overlap=overlap,
            selection=selection,
        )

    def close(self) -> None:
        """End all requests and give back graphs and the backend's workspaces."""
        with self._lock:
            self._closed = True
            self.abort_all()
            self.graphs.close()
            self.backend.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
