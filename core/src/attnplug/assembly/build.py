"""Building of a model's backends from a decision: one branch a deployment form, then wrapping, stamping and binding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, cast

from ..backend import AttentionBackend
from ..decision import Decision
from ..errors import ConfigError
from ..manager import BackendManager
from ..model_spec import ModelSpec
from ..request import Role
from ..spec import Kind
from ..wrappers.hybrid import HybridAttnBackend
from ..wrappers.hybrid_linear import HybridLinearAttnBackend
from ..wrappers.two_batch import TwoBatchOverlapBackend
from .env import BackendEnv, WorkspacePolicy


class DeploymentForm(str, Enum):
    """How one process runs its steps."""

    DEFAULT = "default"
    TWO_BATCH_OVERLAP = "two_batch_overlap"
    """A step is cut in two; each half has backends, metadata and workspace of its own."""


@dataclass(frozen=True, slots=True)
class AttentionBackends:
    """What a model runner holds: the backend to publish in a ForwardContext, and who it is made of."""

    attn_backend: AttentionBackend
    prefill: str
    """Resolved name for prefill; a pure state-space model's is its linear backend."""
    decode: str


def build_attention_backends(
    model: ModelSpec,
    decision: Decision,
    env: BackendEnv,
    manager: BackendManager,
    *,
    form: DeploymentForm = DeploymentForm.DEFAULT,
    draft: bool = False,
    on_ready: Callable[[AttentionBackend], None] | None = None,
) -> AttentionBackends:
    """Build, wrap, stamp and bind a model's backends.

    Order matters: model-family wrappers go outside the prefill/decode pair, so that a side backend exists once; names
    are stamped on the outermost object and on every leaf; then every leaf is bound to the environment's translator;
    then ``on_ready`` does what must precede graph capture.

    Args:
        model: The model; its layers decide whether a linear side exists.
        decision: What ``resolve`` decided, or a lock that was loaded.
        env: Where the backends run.
        manager: Loads and creates plugins.
        form: How steps run.
        draft: Build the draft worker's backends, from the decision's draft roles.
        on_ready: Called with the finished backend, before any capture.

    Raises:
        ConfigError: The decision lacks a role that the model needs.
        BackendLoadError: A plugin fails, and no permitted alternative loads.
        ContractViolation: A leaf reads through another translator.
    """
    if form is DeploymentForm.TWO_BATCH_OVERLAP and not draft:
        # Halves may run at once, so each has a workspace of its own.
        first = _build_one(model, decision, env.replace(workspace=WorkspacePolicy.NEW), manager, draft)
        second = _build_one(model, decision, env.replace(workspace=WorkspacePolicy.NEW), manager, draft)
        built = replace(first, attn_backend=TwoBatchOverlapBackend(first.attn_backend, second.attn_backend))
    else:
        built = _build_one(model, decision, env, manager, draft)
    root = manager.wrap_backend(built.attn_backend, env)
    for backend in (root, *root.leaves()):
        backend.prefill_attention_backend_str = built.prefill
        backend.decode_attention_backend_str = built.decode
    env.translator.bind_and_verify_backends([root])
    if on_ready is not None:
        on_ready(root)
    return replace(built, attn_backend=root)


def _build_one(
    model: ModelSpec, decision: Decision, env: BackendEnv, manager: BackendManager, draft: bool
) -> AttentionBackends:
    if model.kinds == {Kind.LINEAR}:
        linear = manager.create(decision, Role.LINEAR, env.replace(roles=frozenset({Role.LINEAR})), wrap=False)
        return AttentionBackends(linear.backend, linear.name, linear.name)
    prefill_role, decode_role = (Role.DRAFT_PREFILL, Role.DRAFT_DECODE) if draft else (Role.PREFILL, Role.DECODE)
    prefill_choice, decode_choice = decision.choice(prefill_role), decision.choice(decode_role)
    if prefill_choice is None or decode_choice is None:
        raise ConfigError(
            f"the decision names no backend for {prefill_role.value} and {decode_role.value}",
            key=prefill_role.key,
            remedy="resolve again for this model",
        )
    if prefill_choice.chosen == decode_choice.chosen:
        one = manager.create(
            decision, prefill_role, env.replace(roles=frozenset({prefill_role, decode_role})), wrap=False
        )
        built = AttentionBackends(one.backend, one.name, one.name)
    else:
        prefill = manager.create(decision, prefill_role, env.replace(roles=frozenset({prefill_role})), wrap=False)
        decode = manager.create(decision, decode_role, env.replace(roles=frozenset({decode_role})), wrap=False)
        verifying = cast(Literal["prefill", "decode"], decision.speculative_attention_mode)
        pair = HybridAttnBackend(prefill.backend, decode.backend, speculative_attention_mode=verifying)
        built = AttentionBackends(pair, prefill.name, decode.name)
    if Kind.LINEAR not in model.kinds:
        return built
    linear = manager.create(decision, Role.LINEAR, env.replace(roles=frozenset({Role.LINEAR})), wrap=False)
    full_layers = [layer.layer_id for layer in model.layers if layer.kind is not Kind.LINEAR]
    routed = HybridLinearAttnBackend(built.attn_backend, linear.backend, full_layers)
    return replace(built, attn_backend=routed)
