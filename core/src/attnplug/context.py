"""Which backend serves the running forward: published around it, overridden for a part of it, always restored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import ContractViolation

if TYPE_CHECKING:
    from .backend import AttentionBackend
    from .batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What layers read during one forward; ``dataclasses.replace`` it for a sub-batch, stream or draft loop."""

    attn_backend: AttentionBackend
    batch: ForwardBatch | None = None
    """The step that runs: a compiled model's layers read it here, since a compiled graph passes tensors only."""


# A context variable is private to a thread and to an asyncio task, and costs some 30 ns to read.
_current: ContextVar[ForwardContext | None] = ContextVar("attnplug_forward_context", default=None)


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Publish a context for the body; the one before is restored, also when an exception passes."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


def get_forward_context() -> ForwardContext:
    """Return the current context.

    Raises:
        ContractViolation: No forward is running in this thread.
    """
    context = _current.get()
    if context is None:
        raise ContractViolation(
            "an attention layer was called outside a forward",
            remedy="wrap the model's call in `with forward_context(ForwardContext(backend)):`",
        )
    return context


def get_attn_backend() -> AttentionBackend:
    """Return the backend of the current context; raises ContractViolation where there is none."""
    return get_forward_context().attn_backend
