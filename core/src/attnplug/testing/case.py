"""One case of the suite as plain data, and the text that stands for it: whoever has the text can run the case again."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import ConfigError
from ..model_spec import LayerSpec
from ..modes import AttentionType, ForwardMode
from ..spec import Kind
from .codec import LAYER_TOKENS, parse_layer, parse_lens, write_layer, write_lens


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCase:
    """One attention layer of a case."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    v_dim: int = 0
    """0: the same as dim."""
    window: int = -1
    cap: float = 0.0
    sinks: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    scaling: float = 0.0
    """0: 1.25/√dim, on purpose not the usual value, so that a kernel with a value of its own is caught."""
    attn: AttentionType = AttentionType.DECODER
    cross: bool = False
    kind: Kind = Kind.SOFTMAX
    latent: int = 0
    rope: int = 0

    @property
    def value_dim(self) -> int:
        return self.v_dim or self.dim

    @property
    def factor(self) -> float:
        """What q·k is multiplied by."""
        return self.scaling or round(1.25 / math.sqrt(self.dim), 5)

    @property
    def reads_pool(self) -> bool:
        return self.attn is not AttentionType.ENCODER_ONLY

    def spec(self, layer_id: int) -> LayerSpec:
        """Return the layer as a model would describe it."""
        return LayerSpec(
            layer_id=layer_id,
            kind=self.kind,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            v_head_dim=self.value_dim,
            scaling=self.factor,
            sliding_window_size=self.window,
            logit_cap=self.cap,
            has_sinks=self.sinks,
            has_kv_scales=self.k_scale != 1.0 or self.v_scale != 1.0,
            attn_type=self.attn,
            is_cross_attention=self.cross,
            kv_lora_rank=self.latent,
            qk_rope_head_dim=self.rope,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is built and run; see ``id`` for its text. B requests: ``queries`` and ``prefix`` have one entry each."""

    axis: str
    """Letter of the axis, as 'A'."""
    check: str
    """Name of the check in its axis, which holds the claim."""
    mode: ForwardMode
    queries: tuple[int, ...]
    """New tokens of each request."""
    prefix: tuple[int, ...]
    """Cached positions before them."""
    layers: tuple[LayerCase, ...] = (LayerCase(),)
    dtype: str = "float32"
    kv_dtype: str = ""
    """Empty: the same as dtype."""
    page: int = 1
    layout: str = "NHD"
    lse: bool = False
    mask: str = ""
    """Target-verify: empty for a chain; 'full' or 'qlen' for a tree by a mask of that kind."""
    encoder: tuple[int, ...] = ()
    """Encoder positions of each request, for cross attention."""
    mla: str = ""
    """Form that MLA layers are computed in."""
    pad: int = 0
    """Padding requests beside the real ones."""
    save: bool = True
    wrap: str = ""
    """Wrapper around the backend: hybrid, two_batch or hybrid_linear."""
    high: bool = False
    """Requests live at the end of a pool whose offsets exceed 2³¹ elements."""
    place: str = ""
    """Where requests lie in the pool: scattered pages, or 'run', 'swapped' (a run but inside), 'reversed', or
    'shared' for one prefix of all."""
    arg: str = ""
    """What the check alone understands."""
    seed: int = 0

    @property
    def pool_dtype(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def lengths(self) -> tuple[int, ...]:
        """Positions of each request after the step."""
        return tuple(p + q for p, q in zip(self.prefix, self.queries, strict=True))

    @property
    def id(self) -> str:
        """The case as text; ``Case.parse`` reads it back."""
        parts = [
            self.axis,
            self.check,
            self.mode.value,
            f"q={write_lens(self.queries)}",
            f"p={write_lens(self.prefix)}",
        ]
        parts += [self.dtype, "+".join(write_layer(layer) for layer in self.layers)]
        for key, name in _KEYS.items():
            value = getattr(self, name)
            if value != _DEFAULTS[name]:
                text = write_lens(value) if name == "encoder" else str(int(value) if value is True else value)
                parts.append(f"{key}={text}")
        # False is the default of every switch but save.
        return ":".join(parts).replace("save=False", "save=0")

    @classmethod
    def parse(cls, text: str) -> Case:
        """Return the case that a text stands for.

        Raises:
            ConfigError: The text is no case.
        """
        parts = text.strip().split(":")
        try:
            axis, check, mode, queries, prefix, dtype, layers = parts[:7]
            values: dict[str, Any] = {
                "axis": axis,
                "check": check,
                "mode": ForwardMode(mode),
                "queries": parse_lens(queries.removeprefix("q=")),
                "prefix": parse_lens(prefix.removeprefix("p=")),
                "dtype": dtype,
                "layers": tuple(LayerCase(**parse_layer(layer)) for layer in layers.split("+")),
            }
            for part in parts[7:]:
                key, _, value = part.partition("=")
                name = _KEYS[key]
                default = _DEFAULTS[name]
                values[name] = parse_lens(value) if name == "encoder" else _plain(value, default)
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{text!r} is no conformance case: {error}",
                key="case",
                value=text,
                allowed="an id that a report or a failure printed",
                remedy="copy the id whole, in quotes",
            ) from error
        return cls(**values)

    def replace(self, **changes: Any) -> Case:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def with_layers(self, layers: Iterable[LayerCase]) -> Case:
        """Return a copy with other layers."""
        return replace(self, layers=tuple(layers))


_KEYS = {
    "kv": "kv_dtype",
    "page": "page",
    "layout": "layout",
    "lse": "lse",
    "mask": "mask",
    "enc": "encoder",
    "mla": "mla",
    "pad": "pad",
    "save": "save",
    "wrap": "wrap",
    "high": "high",
    "place": "place",
    "arg": "arg",
    "seed": "seed",
}
_DEFAULTS = {one.name: one.default for one in fields(Case)}

assert set(LAYER_TOKENS.values()) <= {one.name for one in fields(LayerCase)}


def _plain(value: str, default: object) -> bool | int | str:
    """Read a value in the type of its default."""
    if isinstance(default, bool):
        return value == "1"
    return int(value) if isinstance(default, int) else value
