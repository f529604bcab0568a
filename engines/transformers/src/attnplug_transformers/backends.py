"""From a configuration to the backend that serves a model, with its pool and tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attnplug.assembly.build import build_attention_backends
from attnplug.assembly.env import BackendEnv
from attnplug.backend import AttentionBackend
from attnplug.config import AttentionConfig
from attnplug.decision import Decision
from attnplug.errors import ConfigError
from attnplug.kv.pools import KVPool, pool_slots
from attnplug.kv.translator import KVIndexTranslator
from attnplug.lock import verify_lock
from attnplug.manager import BackendManager
from attnplug.model_spec import ModelSpec
from attnplug.modes import ForwardMode
from attnplug.select import resolve

from .adapters.base import Adapter, PoolSizes
from .pages import RequestTable
from .sizes import EngineSizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["BackendFactory", "Selection", "Serving", "build_serving", "read_config", "select", "serves_mixed"]

BackendFactory = Callable[[BackendEnv], AttentionBackend]
"""Builds the backend from its environment, in place of the configuration."""

ConfigSource = AttentionConfig | Mapping[str, Any] | str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True)
class Selection:
    """What will serve a model, known before its weights load."""

    config: AttentionConfig
    decision: Decision | None
    """None where a factory builds the backend."""
    manager: BackendManager | None
    page_size: int
    kv_dtype: torch.dtype
    kv_layout: str


@dataclass(frozen=True, slots=True)
class Serving:
    """A backend with what it reads."""

    backend: AttentionBackend
    translator: KVIndexTranslator
    table: RequestTable
    pool: KVPool
    encoder_table: RequestTable | None = None
    """Slots of the encoder's rows, by the rows of ``table``; None where no decoder reads an encoder."""


def read_config(source: ConfigSource, *, page_size: int | None = None) -> AttentionConfig:
    """Return the configuration that an engine's ``attention`` argument means.

    Args:
        source: A configuration, its tables, or a file; None or a file: the ladder with that file.
        page_size: Overrides ``attention.page_size``.

    Raises:
        ConfigError: The file or a value in it is wrong.
    """
    if isinstance(source, AttentionConfig):
        config = source
    elif isinstance(source, Mapping):
        config = AttentionConfig.model_validate(source)
    else:
        config = AttentionConfig.load(source)
    if page_size is None:
        return config
    return config.model_copy(update={"attention": config.attention.model_copy(update={"page_size": page_size})})


def select(
    spec: ModelSpec,
    config: AttentionConfig,
    device: torch.device,
    factory: BackendFactory | None,
    decision: Decision | None = None,
) -> Selection:
    """Choose backends for a model.

    Args:
        spec: What the model asks.
        config: Names, and each backend's options.
        device: Where it will run.
        factory: Builds the backend; nothing is chosen then.
        decision: What another rank decided, in place of choosing here.

    Raises:
        AttnplugError: Nothing that was asked for fits, see ``attnplug.select.resolve``; or what was decided is absent.
    """
    attention = config.attention
    if factory is not None:
        size = 16 if attention.page_size == "auto" else attention.page_size
        dtype = spec.dtype if attention.kv_dtype == "auto" else attention.kv_dtype
        return Selection(config, None, None, size, torch_dtype(dtype), "NHD")
    manager = BackendManager(config=config)
    if decision is None:
        decision = resolve(spec, config, str(device), manager.catalog, prober=manager)
    else:
        verify_lock(decision, manager.catalog, source="the decision")
    if decision.page_size is None or decision.kv_dtype is None:
        raise ConfigError("the decision fixes no page size or KV dtype", remedy="resolve again for this model")
    pool_slots(1, decision.page_size)  # Refuses what no pool of the engine's can be.
    layout = decision.kv_layouts["target"]
    return Selection(config, decision, manager, decision.page_size, torch_dtype(decision.kv_dtype), layout)


def build_serving(
    spec: ModelSpec,
    adapter: Adapter,
    selection: Selection,
    sizes: EngineSizes,
    *,
    dtype: torch.dtype,
    device: torch.device,
    factory: BackendFactory | None,
) -> Serving:
    """Allocate the pool and tables, and build the backend over them.

    Raises:
        ConfigError: The pool and the tables are more than the memory has room for.
        BackendLoadError: A plugin fails to load or to create its backend.
    """
    pool_sizes = PoolSizes(
        num_pages=sizes.num_pages,
        num_encoder_pages=sizes.num_encoder_pages,
        page_size=sizes.page_size,
        dtype=selection.kv_dtype,
        device=device,
        layout=selection.kv_layout,
    )
    width = sizes.limits.max_context_len
    with _fitting(sizes):
        pool = adapter.make_pool(spec, pool_sizes)
        table = RequestTable(sizes.max_batch_size, width, sizes.page_size, device)
        encoder = RequestTable(sizes.max_batch_size, width, sizes.page_size, device) if sizes.max_encoder_len else None
    translator = KVIndexTranslator(
        pool,
        table.device_table,
        encoder_req_to_token=None if encoder is None else encoder.device_table,
        layer_spaces={one.layer_id: pool.space_of(one.layer_id) for one in spec.layers if one.reads_pool},
    )
    env = BackendEnv(
        device=device,
        dtype=dtype,
        kv_dtype=selection.kv_dtype,
        page_size=sizes.page_size,
        req_to_token=table.device_table,
        kv_pool=pool,
        translator=translator,
        model_spec=spec,
        limits=sizes.limits,
    )
    if factory is not None:
        backend = factory(env)
        translator.bind_and_verify_backends([backend])
    else:
        assert selection.decision is not None  # select made both, or neither
        assert selection.manager is not None
        backend = build_attention_backends(spec, selection.decision, env, selection.manager).attn_backend
    return Serving(backend, translator, table, pool, encoder)


@contextmanager
def _fitting(sizes: EngineSizes) -> Iterator[None]:
    """Raise what allocation raises again, as an error that says which sizes were too large."""
    try:
        yield
    # torch's allocators have no common error: RuntimeError on a CPU, its subclass OutOfMemoryError on a GPU.
    except (MemoryError, RuntimeError) as error:
        raise ConfigError(
            f"there is no memory for {sizes.num_pages} pages of {sizes.page_size} tokens and a table of "
            f"{sizes.max_batch_size} requests by {sizes.limits.max_context_len} positions: {error}",
            key="engine",
            remedy="lower num_pages (or kv_cache_bytes), max_batch_size or max_context_len",
        ) from error


def serves_mixed(backend: AttentionBackend, spec: ModelSpec) -> bool:
    """Return whether every layer's backend takes decode rows and prompt chunks in one step."""
    return all(
        ForwardMode.MIXED in backend.unwrap(layer.layer_id, ForwardMode.MIXED).spec.modes
        for layer in spec.layers
        if layer.reads_pool
    )


def check_placement(model: PreTrainedModel, device: str | torch.device | None, dtype: str | torch.dtype | None) -> None:
    """Raise ConfigError where a loaded model is not where or what the caller says it is, or is no model."""
    given: object = model
    if not isinstance(given, torch.nn.Module) or not hasattr(given, "config"):
        raise ConfigError(
            f"model is {type(given).__name__}; allowed: a model of transformers with its weights",
            key="model",
            remedy="pass a loaded model, or a path or id to from_pretrained",
        )
    faults = []
    try:
        wanted = None if device is None else torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"{device!r} names no device: {error}", key="device", value=str(device)) from error
    if wanted is not None and (wanted.type != model.device.type or wanted.index not in (None, model.device.index)):
        faults.append(f"device is {wanted}, the model is on {model.device}")
    if dtype not in (None, "auto") and torch_dtype(dtype) != model.dtype:
        faults.append(f"dtype is {dtype}, the model has {model.dtype}")
    if faults:
        raise ConfigError("; ".join(faults), key="device", remedy="move it first: model.to(device=…, dtype=…)")


def torch_dtype(name: str | torch.dtype) -> torch.dtype:
    """Return torch's dtype of a name.

    Raises:
        ConfigError: torch has no dtype of that name.
    """
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        allowed = "float32, bfloat16, float16"
        raise ConfigError(f"{name!r} names no dtype; allowed: {allowed}", key="dtype", value=str(name), allowed=allowed)
    return dtype
