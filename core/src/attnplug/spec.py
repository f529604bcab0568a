"""What a backend can do, as plain data: standard library only, read without importing any kernel."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum

from .modes import ForwardMode, GraphLevel, Phase

__all__ = [
    "CONTRACT",
    "CONTRACT_FEATURES",
    "BackendSpec",
    "Dims",
    "Feature",
    "ForwardMode",
    "GraphLevel",
    "IndexKind",
    "Kind",
    "Phase",
]

CONTRACT = (1, 0)
"""Major and minor of the contract this core speaks; the major is also in the entry-point groups' names."""

CONTRACT_FEATURES: frozenset[str] = frozenset({"extras", "lse", "read_ends", "translator", "verify_mask"})
"""Named parts of the contract that a spec may say it needs; an unknown one makes it INCOMPATIBLE."""


class Kind(str, Enum):
    """A family of attention that a layer asks for."""

    SOFTMAX = "softmax"
    MLA = "mla"
    LINEAR = "linear"
    SPARSE = "sparse"


class Feature(str, Enum):
    """What a model or a deployment may ask beyond plain causal attention. Undeclared means refused."""

    SLIDING_WINDOW = "sliding_window"
    SINKS = "sinks"
    SOFTCAP = "softcap"
    CHAIN_VERIFY = "chain_verify"
    """Target-verify of a chain of drafts (causal)."""
    CUSTOM_MASK = "custom_mask"
    """Target-verify of a tree of drafts, by an explicit mask."""
    CROSS_ATTENTION = "cross_attention"
    ENCODER_ONLY = "encoder_only"
    BIDIRECTIONAL = "bidirectional"
    """Cached attention without causality, and windows |p - k| <= w."""
    V_HEAD_DIM = "v_head_dim"
    """Value heads of another width than query heads."""
    HETEROGENEOUS_LAYERS = "heterogeneous_layers"
    """Layers of one model that differ in heads or head dimensions."""
    FP8_KV = "fp8_kv"
    KV_SCALES = "kv_scales"
    """k_scale and v_scale other than 1."""
    LSE = "lse"
    DETERMINISTIC = "deterministic"
    """A row's result is bitwise the same whatever else is in the batch."""
    MLA_ABSORBED = "mla_absorbed"
    MLA_ONE_SHOT = "mla_one_shot"
    MLA_CHUNKED_PREFIX = "mla_chunked_prefix"


class IndexKind(str, Enum):
    """How a backend's kernels address KV slots."""

    CSR = "csr"
    PAGE_TABLE = "page_table"
    ROW_TABLE = "row_table"


@dataclass(frozen=True, slots=True)
class Dims:
    """A set of whole numbers: explicit values, or a range with a step; the default is every positive number."""

    values: tuple[int, ...] = ()
    minimum: int = 1
    maximum: int | None = None
    multiple_of: int = 1

    def __contains__(self, n: object) -> bool:
        if not isinstance(n, int):
            return False
        if self.values:
            return n in self.values
        return n >= self.minimum and (self.maximum is None or n <= self.maximum) and n % self.multiple_of == 0

    def __str__(self) -> str:
        if self.values:
            return ", ".join(str(v) for v in self.values)
        text = f"{self.minimum}…{self.maximum}" if self.maximum is not None else f"≥ {self.minimum}"
        return text + (f", multiples of {self.multiple_of}" if self.multiple_of > 1 else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSpec:
    """What one backend can do and what it needs. Frozen, importable without torch.

    Every field is a promise that conformance proves; whatever is not declared is refused before any kernel runs.
    """

    name: str
    """The identity of the backend, equal to its entry points' name: letters, digits, '_', '-' and '.'."""
    summary: str = ""
    """One line for ``attnplug list``."""
    aliases: tuple[str, ...] = ()
    """Old names that forward here with a DeprecationWarning."""
    contract: tuple[int, int] = CONTRACT
    """Major, and the lowest minor that this backend needs."""
    needs: frozenset[str] = frozenset()
    """Members of CONTRACT_FEATURES that this backend needs."""
    kinds: frozenset[Kind] = frozenset({Kind.SOFTMAX})
    device_types: frozenset[str] = frozenset({"cuda"})
    """torch device types, such as 'cpu' and 'cuda'."""
    compute_capability: tuple[int | None, int | None] = (None, None)
    """Lowest and highest CUDA compute capability, as 90 for sm_90, both included; read on CUDA devices only."""
    phases: frozenset[Phase] = frozenset({Phase.PREFILL, Phase.DECODE})
    modes: frozenset[ForwardMode] = frozenset({ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.IDLE})
    """Forward modes served. MIXED here means a ``forward_mixed`` of its own or an extend that takes mixed rows."""
    native_mixed: bool = False
    """Whether MIXED batches go to ``forward_mixed`` instead of ``forward_extend``."""
    dtypes: frozenset[str] = frozenset({"bfloat16", "float16"})
    """Query dtypes, by torch's names."""
    kv_dtypes: frozenset[str] = frozenset({"bfloat16", "float16"})
    """Pool dtypes, by torch's names; 'float8_e4m3fn' and 'float8_e5m2' also need FP8_KV."""
    kv_layouts: frozenset[str] = frozenset({"NHD"})
    """'NHD' is [slots, heads, dim]; 'HND' is [pages, heads, page_size, dim]."""
    head_dims: Dims = field(default_factory=Dims)
    v_head_dims: Dims = field(default_factory=Dims)
    group_sizes: Dims = field(default_factory=Dims)
    """Query heads a KV head."""
    kv_lora_ranks: Dims = field(default_factory=Dims)
    rope_head_dims: Dims = field(default_factory=Dims)
    page_sizes: Dims = field(default_factory=Dims)
    max_context_len: int | None = None
    features: frozenset[Feature] = frozenset()
    linear_families: frozenset[str] = frozenset()
    """Families of linear attention served, such as 'gdn' and 'mamba2'."""
    graph_level: GraphLevel = GraphLevel.NONE
    needs_cpu_seq_lens: bool = True
    """Whether a step reads the host mirror of the lengths; only then is it paid for."""
    index_kinds: frozenset[IndexKind] = frozenset({IndexKind.CSR})
    priority: int = 0
    """Rank among eligible backends under 'auto': higher first. The reference is 0; a tuned library 50 to 100."""
    kernel_modules: tuple[str, ...] = ()
    """Importable modules of the kernel library; a missing one makes the backend MISSING_KERNEL, without import."""
    experimental: bool = False

    def validate(self) -> list[str]:
        """Return every fault of the declaration itself, empty where there is none."""
        faults = []
        if not self.name or not all(c.isalnum() or c in "_-." for c in self.name):
            faults.append(f"name {self.name!r} must be letters, digits, '_', '-' or '.'")
        for name, empty in (
            ("kinds", not self.kinds),
            ("device_types", not self.device_types),
            ("phases", not self.phases),
            ("modes", not self.modes),
            ("dtypes", not self.dtypes),
            ("kv_dtypes", not self.kv_dtypes),
            ("index_kinds", not self.index_kinds),
        ):
            if empty:
                faults.append(f"{name} is empty: the backend could serve nothing")
        for name, kind in (
            ("kinds", Kind),
            ("phases", Phase),
            ("modes", ForwardMode),
            ("features", Feature),
            ("index_kinds", IndexKind),
        ):
            wrong = [repr(v) for v in getattr(self, name) if not isinstance(v, kind)]
            if wrong:
                faults.append(f"{name} holds {', '.join(sorted(wrong))}; allowed: members of {kind.__name__}")
        if any(d.startswith("float8") for d in self.kv_dtypes) and Feature.FP8_KV not in self.features:
            faults.append("kv_dtypes names an fp8 dtype but features lacks FP8_KV")
        if self.native_mixed and ForwardMode.MIXED not in self.modes:
            faults.append("native_mixed is set but modes lacks MIXED")
        if (Kind.LINEAR in self.kinds) != bool(self.linear_families):
            faults.append("kinds names LINEAR exactly when linear_families is not empty")
        return faults

    def replace(self, **changes: object) -> BackendSpec:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
