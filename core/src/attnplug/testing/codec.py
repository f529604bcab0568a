"""The short texts inside a case's id: lists of lengths, and layers."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

from ..modes import AttentionType
from ..spec import Kind

LAYER_TOKENS = {
    "v": "v_dim",
    "w": "window",
    "c": "cap",
    "ks": "k_scale",
    "vs": "v_scale",
    "sc": "scaling",
    "lora": "latent",
    "rope": "rope",
}
_FLOATS = frozenset({"cap", "k_scale", "v_scale", "scaling"})
_DEFAULTS = {"window": -1, "k_scale": 1.0, "v_scale": 1.0}
_TYPES = {"bidir": AttentionType.DECODER_BIDIRECTIONAL, "enconly": AttentionType.ENCODER_ONLY}


def write_lens(lens: tuple[int, ...]) -> str:
    """Return ``(1, 1, 1, 7)`` as ``1x3,7``; an empty tuple is ``-``."""
    runs = [(value, len(list(run))) for value, run in groupby(lens)]
    return ",".join(f"{value}x{count}" if count > 1 else str(value) for value, count in runs) or "-"


def parse_lens(text: str) -> tuple[int, ...]:
    """Return what ``write_lens`` wrote; raises ValueError on anything else."""
    if text == "-":
        return ()
    lens: list[int] = []
    for part in text.split(","):
        value, _, count = part.partition("x")
        lens += [int(value)] * int(count or 1)
    return tuple(lens)


def write_layer(layer: Any) -> str:
    """Return a LayerCase as ``4/2x64,v32,w15,c3.0,s``: heads, KV heads, width, then what differs from the defaults."""
    parts = [f"{layer.heads}/{layer.kv_heads}x{layer.dim}"]
    for token, name in LAYER_TOKENS.items():
        value = getattr(layer, name)
        if value != _DEFAULTS.get(name, 0):
            parts.append(f"{token}{value}")
    parts += ["s"] * layer.sinks + ["cross"] * layer.cross
    parts += [text for text, kind in _TYPES.items() if layer.attn is kind]
    parts += [layer.kind.value] * (layer.kind is not Kind.SOFTMAX)
    return ",".join(parts)


def parse_layer(text: str) -> dict[str, Any]:
    """Return the fields of the LayerCase that ``write_layer`` wrote; raises ValueError on anything else."""
    shape, *rest = text.split(",")
    found = re.fullmatch(r"(\d+)/(\d+)x(\d+)", shape)
    if found is None:
        raise ValueError(f"layer {text!r} must start as heads/kv_heads x dim")
    fields: dict[str, Any] = dict(zip(("heads", "kv_heads", "dim"), map(int, found.groups())))
    for part in rest:
        if part in ("s", "cross"):
            fields["sinks" if part == "s" else "cross"] = True
        elif part in _TYPES:
            fields["attn"] = _TYPES[part]
        elif part in [kind.value for kind in Kind]:
            fields["kind"] = Kind(part)
        else:
            token = re.fullmatch(r"([a-z]+)(-?[\d.e+-]+)", part)
            if token is None or token[1] not in LAYER_TOKENS:
                raise ValueError(f"layer {text!r}: {part!r} is not understood")
            name = LAYER_TOKENS[token[1]]
            fields[name] = float(token[2]) if name in _FLOATS else int(token[2])
    return fields
