"""What a declaration lets the suite ask: the cases of every axis are drawn from it, and from nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from ..errors import ConfigError
from ..modes import ForwardMode
from ..spec import BackendSpec, Dims, Feature, Kind
from .case import Case, LayerCase
from .subject import Subject

HEAD_DIMS = (64, 128, 256, 96, 80, 72, 112, 160, 192, 32, 16, 40, 48, 24, 8)
"""Widths in use by models, the likeliest first; what a declaration allows of them is tried."""
GROUPS = (2, 4, 1, 8, 16, 3, 5, 7, 32, 64, 128)
PAGES = (16, 1, 64, 32, 128, 2, 4, 8, 256)
LATENTS = (512, 256, 128, 64)
ROPES = (64, 32, 16)
DTYPES = ("float32", "bfloat16", "float16", "float64")
FP8 = ("float8_e4m3fn", "float8_e5m2")


class Profile(IntEnum):
    """How much is run; each holds the ones before it but for what only a GPU can do."""

    QUICK = 0
    GPU = 1
    FULL = 2

    @classmethod
    def named(cls, name: str) -> Profile:
        """Return a profile by its word; raises ConfigError for any other."""
        try:
            return cls[name.upper()]
        except KeyError:
            allowed = ", ".join(one.name.lower() for one in cls)
            raise ConfigError(
                f"profile {name!r} is not known",
                key="profile",
                value=name,
                allowed=allowed,
                remedy="choose one of these",
            ) from None


@dataclass(frozen=True, slots=True)
class Plan:
    """A subject with how much of it to try."""

    subject: Subject
    profile: Profile = Profile.QUICK

    @property
    def spec(self) -> BackendSpec:
        return self.subject.spec

    @property
    def full(self) -> bool:
        return self.profile is Profile.FULL

    @property
    def on_gpu(self) -> bool:
        return self.subject.device.type == "cuda"

    def has(self, *features: Feature) -> bool:
        """Whether every feature is declared."""
        return all(feature in self.spec.features for feature in features)

    @property
    def softmax(self) -> bool:
        return Kind.SOFTMAX in self.spec.kinds

    @property
    def modes(self) -> tuple[ForwardMode, ...]:
        """Declared modes that compute something, in the enum's order."""
        verify = self.has(Feature.CHAIN_VERIFY) or self.has(Feature.CUSTOM_MASK)
        return tuple(
            mode
            for mode in ForwardMode
            if mode in self.spec.modes
            and mode is not ForwardMode.IDLE
            and (verify or mode is not ForwardMode.TARGET_VERIFY)
        )

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Declared query dtypes, the strictest for this device first."""
        order = DTYPES if not self.on_gpu else ("bfloat16", "float16", "float32", "float64")
        return tuple(dtype for dtype in order if dtype in self.spec.dtypes)

    @property
    def dtype(self) -> str:
        """The dtype that cases use where it is not their subject."""
        return next((d for d in self.dtypes if d in self.spec.kv_dtypes), self.dtypes[0])

    @property
    def kv_dtype(self) -> str:
        """Empty where the pool holds the model's dtype, as it mostly does."""
        if self.dtype in self.spec.kv_dtypes:
            return ""
        return sorted(self.spec.kv_dtypes)[0]

    @property
    def fp8_dtypes(self) -> tuple[str, ...]:
        return tuple(dtype for dtype in FP8 if dtype in self.spec.kv_dtypes)

    @property
    def pages(self) -> tuple[int, ...]:
        return choose(PAGES, self.spec.page_sizes)

    @property
    def page(self) -> int:
        return self.pages[0]

    @property
    def layouts(self) -> tuple[str, ...]:
        return tuple(layout for layout in ("NHD", "HND") if layout in self.spec.kv_layouts)

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Widths for which keys and values may have one width."""
        return tuple(d for d in choose(HEAD_DIMS, self.spec.head_dims) if d in self.spec.v_head_dims)

    @property
    def groups(self) -> tuple[int, ...]:
        return choose(GROUPS, self.spec.group_sizes)

    def layer(self, **changes: Any) -> LayerCase:
        """Return a small softmax layer that the declaration covers, with some fields changed."""
        dims, group = self.head_dims, self.groups[0]
        if dims:
            shape: dict[str, Any] = {"dim": dims[0]}
        else:
            # Only unequal widths are declared.
            width = choose(HEAD_DIMS, self.spec.head_dims)[0]
            shape = {"dim": width, "v_dim": choose(HEAD_DIMS, self.spec.v_head_dims)[0]}
        return LayerCase(**{"heads": 2 * group, "kv_heads": 2, **shape, **changes})

    def case(self, axis: str, check: str, mode: ForwardMode, layer: LayerCase | None = None, **changes: Any) -> Case:
        """Return a case with the declaration's defaults."""
        fields: dict[str, Any] = {
            "axis": axis,
            "check": check,
            "mode": mode,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "page": self.page,
            "layout": self.layouts[0],
            **changes,
        }
        if "layers" not in fields:
            fields["layers"] = (self.layer() if layer is None else layer,)
        fields.setdefault("queries", usual_queries(mode))
        fields.setdefault("prefix", usual_prefix(mode))
        return Case(**fields)

    def verify_forms(self) -> tuple[str, ...]:
        """Return the masks that target-verify may be asked with: '' is a chain."""
        chain = ("",) if self.has(Feature.CHAIN_VERIFY) else ()
        return chain + (("qlen", "full") if self.has(Feature.CUSTOM_MASK) else ())

    def free_memory(self) -> int:
        """Return bytes that a case may take on the device."""
        if self.on_gpu:
            return torch.cuda.mem_get_info(self.subject.device)[0]
        return 2 << 30


def choose(wanted: Iterable[int], declared: Dims) -> tuple[int, ...]:
    """Return the wanted numbers that are declared; where none is, the smallest declared one."""
    found = tuple(n for n in wanted if n in declared)
    return found or (min(declared.values) if declared.values else max(declared.minimum, declared.multiple_of),)


def undeclared(wanted: Iterable[int], declared: Dims) -> tuple[int, ...]:
    """Return the wanted numbers that are not declared."""
    return tuple(n for n in wanted if n not in declared)


def usual_queries(mode: ForwardMode) -> tuple[int, ...]:
    """Return queries of a small ragged batch of a mode."""
    if mode is ForwardMode.DECODE:
        return (1, 1, 1, 1)
    if mode is ForwardMode.MIXED:
        return (7, 1, 1, 19)
    if mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND):
        return (4, 4, 4)
    return (5, 1, 23)


def usual_prefix(mode: ForwardMode) -> tuple[int, ...]:
    """Return cached lengths of a small ragged batch of a mode; the first is nothing, some cross a page."""
    if mode is ForwardMode.DECODE:
        return (0, 7, 30, 70)
    if mode is ForwardMode.MIXED:
        return (9, 33, 0, 0)
    if mode is ForwardMode.TARGET_VERIFY:
        return (1, 18, 63)
    return (0, 13, 40)
