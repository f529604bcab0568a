"""What a model and a deployment ask of one role's backend, computed before any backend is looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from .device import DeviceFacts
from .model_spec import LayerSpec, ModelSpec
from .modes import AttentionType, ForwardMode, GraphLevel, Phase
from .spec import Feature, Kind

if TYPE_CHECKING:
    from .config import AttentionConfig


class Role(str, Enum):
    """A place in a deployment that one backend fills. Prefill and decode share one KV pool; so do the draft's."""

    PREFILL = "prefill"
    DECODE = "decode"
    LINEAR = "linear"
    DRAFT_PREFILL = "draft.prefill"
    DRAFT_DECODE = "draft.decode"

    @property
    def is_draft(self) -> bool:
        return self in (Role.DRAFT_PREFILL, Role.DRAFT_DECODE)

    @property
    def pool(self) -> str:
        """The KV pool that the role reads: roles of one pool must agree on its layout."""
        return "state" if self is Role.LINEAR else "draft" if self.is_draft else "target"

    @property
    def key(self) -> str:
        """The dotted configuration key that chooses the role's backend."""
        return f"attention.{self.value}"


class Speculation(str, Enum):
    """Whether drafts are verified, and their form."""

    NONE = "none"
    CHAIN = "chain"
    TREE = "tree"


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """What an engine asks beyond the model and the configuration."""

    speculation: Speculation = Speculation.NONE
    draft_model: ModelSpec | None = None
    """The draft worker's model; None: drafts come from the target model's own layers."""
    modes: frozenset[ForwardMode] = frozenset()
    """Modes used beyond extend and decode: MIXED, SPLIT_PREFILL, DLLM_EXTEND."""
    graph_level: GraphLevel = GraphLevel.NONE
    """The lowest level that decode must be captured at; NONE: capture what the backend can."""
    features: frozenset[Feature] = frozenset()
    """Features asked of every role, such as DETERMINISTIC and LSE."""
    overlap: bool = False
    """Whether the host prepares a step while another runs: backends that need no host lengths are preferred."""
    max_context_len: int | None = None
    """The longest context served; None: the model's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What one role asks. Frozen, and a pure function of model, configuration, deployment and device."""

    role: Role
    phases: frozenset[Phase]
    modes: frozenset[ForwardMode]
    layers: tuple[LayerSpec, ...]
    """The layers this role serves; empty where no model is given, and then only the rest is checked."""
    device: DeviceFacts
    dtype: str | None
    """torch's name of the activations' dtype; None where no model is given."""
    kv_dtype: str | None
    """The pool's dtype; None where neither the model nor the configuration says."""
    page_size: int | None
    """Tokens a page; None: any that all roles accept."""
    graph_level: GraphLevel
    features: frozenset[Feature]
    max_context_len: int | None
    overlap: bool = False


def make_requests(
    model: ModelSpec | None, config: AttentionConfig, device: DeviceFacts, deployment: Deployment
) -> tuple[Request, ...]:
    """Return one request for each role that the model and the deployment need, in the roles' order."""
    attention = config.attention
    speculative = deployment.speculation is not Speculation.NONE
    roles = [role for role in (Role.PREFILL, Role.DECODE) if model is None or model.kinds - {Kind.LINEAR}]
    if model is not None and Kind.LINEAR in model.kinds:
        roles.append(Role.LINEAR)
    if speculative:
        roles.extend((Role.DRAFT_PREFILL, Role.DRAFT_DECODE))
    requests = []
    for role in roles:
        served = deployment.draft_model or model if role.is_draft else model
        layers = tuple(layer for layer in served.layers if _serves(role, layer)) if served else ()
        if role.is_draft and served is not None and not layers:
            continue
        modes, features = _modes(role, attention.speculative_attention_mode, deployment)
        graphs = deployment.graph_level if attention.graphs == "auto" else GraphLevel.NONE
        dtype = served.dtype if served else None
        requests.append(
            Request(
                role=role,
                phases=frozenset(_phases(role, modes)),
                modes=modes,
                layers=layers,
                device=device,
                dtype=dtype,
                kv_dtype=dtype if attention.kv_dtype == "auto" else attention.kv_dtype,
                page_size=None if attention.page_size == "auto" else attention.page_size,
                graph_level=graphs if Phase.DECODE in _phases(role, modes) else GraphLevel.NONE,
                features=features | deployment.features,
                max_context_len=deployment.max_context_len or (served.max_context_len if served else None),
                overlap=deployment.overlap,
            )
        )
    return tuple(requests)


def _serves(role: Role, layer: LayerSpec) -> bool:
    if role is Role.LINEAR or layer.kind is Kind.LINEAR:
        return role is Role.LINEAR and layer.kind is Kind.LINEAR
    # An encoder's rows are seen once, in prefill.
    return layer.attn_type is not AttentionType.ENCODER_ONLY or role in (Role.PREFILL, Role.DRAFT_PREFILL)


def _modes(
    role: Role, verifying_side: str, deployment: Deployment
) -> tuple[frozenset[ForwardMode], frozenset[Feature]]:
    extra = deployment.modes - {ForwardMode.IDLE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND}
    prefill = {ForwardMode.EXTEND, *(mode for mode in extra if mode.is_extend)}
    if role is Role.DRAFT_PREFILL:
        return frozenset({ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND}), frozenset()
    if role is Role.DRAFT_DECODE:
        return frozenset({ForwardMode.DECODE}), frozenset()
    modes = prefill | {ForwardMode.DECODE} if role is Role.LINEAR else prefill
    if role is Role.DECODE:
        modes = {ForwardMode.DECODE}
    features: set[Feature] = set()
    if deployment.speculation is not Speculation.NONE and role.value in (verifying_side, Role.LINEAR.value):
        modes = modes | {ForwardMode.TARGET_VERIFY}
        chain = deployment.speculation is Speculation.CHAIN
        features.add(Feature.CHAIN_VERIFY if chain else Feature.CUSTOM_MASK)
    return frozenset(modes), frozenset(features)


def _phases(role: Role, modes: Iterable[ForwardMode]) -> set[Phase]:
    phases = {Role.LINEAR: {Phase.PREFILL, Phase.DECODE}}.get(
        role, {Phase.PREFILL if role in (Role.PREFILL, Role.DRAFT_PREFILL) else Phase.DECODE}
    )
    return phases | {Phase.VERIFY} if ForwardMode.TARGET_VERIFY in modes else phases
