"""Everything a backend may know of where it runs. No engine object, no environment variable, no global."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ..kv.pools import KVPool
from ..kv.translator import KVIndexTranslator
from ..model_spec import ModelSpec
from ..request import Role


class WorkspacePolicy(str, Enum):
    """Whether a backend may take the workspace that others of its distribution use, which must never run at once."""

    SHARED = "shared"
    NEW = "new"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Maxima that buffers are sized by."""

    max_batch_size: int
    max_num_tokens: int
    """Most query tokens of a step."""
    max_context_len: int
    draft_token_num: int = 0
    """Widest draft window that target-verify brings; 0: none. A verifier sizes its mask by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Where this process stands among those that share the model."""

    tp_rank: int = 0
    tp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendEnv:
    """What a backend is built from; frozen, the same for every backend of a model but for roles and workspace."""

    device: torch.device
    dtype: torch.dtype
    """Of the model's activations."""
    kv_dtype: torch.dtype
    page_size: int
    req_to_token: Tensor
    """[R, max_context] int32, device; the scheduler's. Read it through the translator."""
    kv_pool: KVPool
    translator: KVIndexTranslator
    model_spec: ModelSpec
    limits: Limits
    parallel: Parallel = field(default_factory=Parallel)
    roles: frozenset[Role] = frozenset({Role.PREFILL, Role.DECODE})
    """What the backend will serve: one built for decode alone plans no prefill."""
    workspace: WorkspacePolicy = WorkspacePolicy.SHARED
    deterministic: bool = False
    """Ask for results that do not depend on what else is in the batch."""

    def replace(self, **changes: Any) -> BackendEnv:
        """Return a copy with some fields changed."""
        return replace(self, **changes)
