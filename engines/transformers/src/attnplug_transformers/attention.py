"""The bridge from a transformers model to ``AttentionLayer``: its ``AttentionInterface``, for the length of a step.

Outside a step the model is as its owner left it: the attention implementation is switched for a forward of the engine
and switched back after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from attnplug.batch import ForwardBatch
from attnplug.errors import ContractViolation, UnsupportedModel
from attnplug.layer import AttentionLayer
from attnplug.spec import Kind

__all__ = ["IMPLEMENTATION", "AttentionStep", "Attend", "ModelLoan", "attention_forward"]

Attend = Callable[[nn.Module, AttentionLayer, Tensor, Tensor, Tensor, ForwardBatch], Tensor]
"""A module's attention by its layer: (module, layer, q [T, Hq, D], k [T, Hk, D], v [T, Hk, Dv], batch) to out."""

IMPLEMENTATION = "attnplug"
"""The name under which transformers finds ``attention_forward``.

No mask function is registered for it: transformers then builds no mask, nor looks for packed sequences, which would
synchronise."""


class AttentionStep(NamedTuple):
    """What the model's attention modules need of the running step."""

    batch: ForwardBatch
    layers: Mapping[nn.Module, AttentionLayer]
    """The layer of each attention module."""
    seen: list[nn.Module] | None
    """In an engine's first step: which modules have called, in order, each compared with its layer. Later None."""
    attend: Attend
    """The bridge's."""


_current: ContextVar[AttentionStep | None] = ContextVar("attnplug_transformers_step", default=None)


@contextmanager
def attention_step(step: AttentionStep) -> Iterator[None]:
    """Publish a step to this thread's attention calls, and take it back whatever happens."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Serve one attention module of a transformers model; the signature is theirs.

    Args:
        module: Who asks; names its layer.
        query: [1, Hq, T, D], the model's dtype: the step's tokens, flattened; or [n, Hq, T/n, D] of an encoder whose n
            inputs are of one length.
        key: [1, Hk, T, D]; of MLA the latent rows, [1, 1, T, C]; of cross attention the encoder's new rows.
        value: [1, Hk, T, Dv]; of MLA the rotated key rows, [1, 1, T, R].
        attention_mask: None: positions and lengths are the batch's.
        scaling: Compared with the layer's on the module's first call, as are window, cap and sinks among the rest.
        dropout: Not read: the engine serves models in evaluation mode.
        kwargs: What the model's family passes beside these.

    Returns:
        [1, T, Hq, Dv], or [n, T/n, Hq, Dv], and no weights.

    Raises:
        ContractViolation: No step of an engine is running in this thread.
        UnsupportedModel: The call asks what the layer does not say.
    """
    step = _current.get()
    if step is None:
        raise ContractViolation(
            "a model was called while an engine in another thread is running a step with it",
            remedy="call it between the engine's steps, or load a model of your own for this thread",
        )
    layer = step.layers.get(module)
    if layer is None or step.seen is not None or attention_mask is not None:
        layer = _check_call(step, module, query, key, value, scaling, {**kwargs, "attention_mask": attention_mask})
    out = step.attend(module, layer, _rows(query), _rows(key), _rows(value), step.batch)
    return out.reshape(query.shape[0], query.shape[2], *out.shape[1:]), None


def _rows(x: Tensor) -> Tensor:
    """Return [n, H, S, D] as [n·S, H, D]: a view where n is 1."""
    return x[0].transpose(0, 1) if x.shape[0] == 1 else x.transpose(1, 2).flatten(0, 1)


def _check_call(
    step: AttentionStep,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    kwargs: Mapping[str, Any],
) -> AttentionLayer:
    layer = step.layers.get(module)
    if layer is None:
        raise UnsupportedModel(
            f"{type(module).__name__} asked for attention, and the model's ModelSpec has no layer for it",
            remedy="add a family that reads this architecture (see docs/models.md)",
        )
    window = kwargs.get("sliding_window")
    asked: dict[str, tuple[Any, Any]] = {
        "query heads": (query.shape[1], layer.num_heads),
        "head_dim": (query.shape[3], layer.head_dim),
        "sliding_window_size": (-1 if window is None else window - 1, layer.sliding_window_size),
        "logit_cap": (float(kwargs.get("softcap") or 0.0), layer.logit_cap),
        "sinks": (kwargs.get("s_aux") is not None, layer.sinks is not None),
        # transformers makes none here, so a mask is of the module's own making: a rule that no field describes.
        "a mask of its own": (kwargs.get("attention_mask") is not None, False),
        "calls in a step": (1 + (step.seen or []).count(module), 1),
    }
    if layer.kind is Kind.MLA:
        latent, rope = (1, layer.kv_lora_rank), (1, layer.qk_rope_head_dim)
        asked["latent rows (heads, width)"] = ((key.shape[1], key.shape[3]), latent)
        asked["rotated key rows (heads, width)"] = ((value.shape[1], value.shape[3]), rope)
    else:
        asked["KV heads"] = (key.shape[1], layer.num_kv_heads)
        asked["v_head_dim"] = (value.shape[3], layer.v_head_dim)
    if scaling is not None:
        asked["scaling"] = (scaling, layer.scaling)
    wrong = [
        f"{name}: the call has {actual}, the ModelSpec {said}"
        for name, (actual, said) in asked.items()
        if (abs(actual - said) > 1e-6 * abs(said) if isinstance(said, float) else actual != said)
    ]
    if wrong:
        raise UnsupportedModel(
            f"layer {layer.layer_id} ({type(module).__name__}) does not call attention as its ModelSpec says:\n  "
            + "\n  ".join(wrong),
            remedy="add a family that reads this architecture (see docs/models.md)",
        )
    if step.seen is not None:
        step.seen.append(module)
    return layer


_locks: WeakKeyDictionary[PreTrainedModel, threading.RLock] = WeakKeyDictionary()
_locks_guard = threading.Lock()


class ModelLoan:
    """Switches a model to this bridge for the length of a step, and back.

    Args:
        model: Whose attention is to be served.

    Raises:
        UnsupportedModel: The model does not take its attention from transformers' ``AttentionInterface``.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        AttentionInterface.register(IMPLEMENTATION, attention_forward)
        with _locks_guard:
            self._lock = _locks.setdefault(model, threading.RLock())
        with self._lock:
            # The public call decides which configs of a model's parts change; a step then switches just those.
            before = [(config, config._attn_implementation) for config in _configs(model)]
            try:
                model.set_attn_implementation(IMPLEMENTATION)
                self._configs = [config for config, _ in before if config._attn_implementation == IMPLEMENTATION]
            finally:
                _restore(before)
        if model.config not in self._configs:
            raise UnsupportedModel(
                f"{type(model).__name__} computes attention by itself, not through transformers' AttentionInterface",
                remedy="serve a model whose attention implementation can be set (model.set_attn_implementation)",
            )

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold the model, with its attention served by the step of this thread."""
        with self._lock:
            before = [(config, config._attn_implementation) for config in self._configs]
            try:
                for config in self._configs:
                    config._attn_implementation = IMPLEMENTATION
                yield
            finally:
                _restore(before)


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return each config of a model and its parts once, wholes before parts."""
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    for config in configs:
        parts = (getattr(config, name, None) for name in config.sub_configs)
        configs.extend(part for part in parts if part is not None and all(part is not one for one in configs))
    return list({id(config): config for config in configs}.values())


def _restore(before: list[tuple[PreTrainedConfig, str]]) -> None:
    # Setting a whole sets its parts too, so parts come after.
    for config, implementation in before:
        config._attn_implementation = implementation
