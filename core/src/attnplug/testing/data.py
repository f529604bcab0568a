"""The logical tensors of a case: what the model passes, what a pool stores, and what a reader of the pool gets."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..modes import MlaForm
from ..spec import Kind
from .case import Case, LayerCase
from .poison import huge

CAP_REACH = 5.0
"""A cap up to this bends ordinary scores; for a larger one the queries grow, so that it bends theirs."""


@dataclass(slots=True)
class LayerData:
    """One layer's tensors, a list entry a request. n queries, S positions (cross attention: the encoder's)."""

    q: list[Tensor]
    """[n, Hq, D], the model's dtype; absorbed MLA: [n, Hq, C + R]."""
    k: list[Tensor]
    """[S, Hk, D], the model's dtype: what the model passes for positions that are new."""
    v: list[Tensor]
    """[S, Hk, Dv] likewise."""
    k_true: list[Tensor]
    """[S, Hk, D] float64: what attention is over."""
    v_true: list[Tensor]
    k_units: list[Tensor]
    """[S, Hk, D] in the pool's dtype, before the scale: the pool's bytes. MLA: [S, 1, C + R]."""
    v_units: list[Tensor]
    """[S, Hk, Dv] likewise; empty for MLA."""
    latent: list[Tensor]
    """MLA: [S, C + R], the model's dtype, for positions that are new; else empty."""
    sinks: Tensor | None
    """[Hq] float32."""


def draw(case: Case, index: int, device: torch.device) -> LayerData:
    """Return one layer's data, the same for every backend; made on the CPU, then moved.

    Keys and values are exact in the pool's dtype, so that reading them from the pool and taking them as they are passed
    is the same, and an error is the kernel's.
    """
    layer, dtype = case.layers[index], _torch(case.dtype)
    lengths = case.encoder if layer.cross else case.lengths
    absorbed = layer.kind is Kind.MLA and case.mla == MlaForm.ABSORBED.value
    width = layer.latent + layer.rope if absorbed else layer.dim
    gain = max(1.0, layer.cap / CAP_REACH)
    data = LayerData([], [], [], [], [], [], [], [], None)
    for b, (queries, length) in enumerate(zip(case.queries, lengths, strict=True)):
        q = gain * _normal(case, f"q{index}.{b}", (queries, layer.heads, width))
        data.q.append(q.to(dtype).to(device))
        if layer.kind is Kind.MLA:
            _draw_latent(data, case, index, b, length)
        else:
            _draw_heads(data, case, index, b, length)
    for name in ("k", "v", "k_true", "v_true", "k_units", "v_units", "latent"):
        setattr(data, name, [one.to(device) for one in getattr(data, name)])
    if layer.kind is Kind.MLA and not absorbed:
        heads, values = (layer.heads, layer.dim), (layer.heads, layer.value_dim)
        data.k = [_normal(case, f"k{index}.{b}", (n, *heads)).to(dtype).to(device) for b, n in enumerate(lengths)]
        data.v = [_normal(case, f"v{index}.{b}", (n, *values)).to(dtype).to(device) for b, n in enumerate(lengths)]
        data.k_true, data.v_true = [k.double() for k in data.k], [v.double() for v in data.v]
    if layer.sinks:
        data.sinks = (1.5 + _normal(case, f"s{index}", (layer.heads,))).to(device)
    if not layer.reads_pool:
        data.k_true, data.v_true = [k.double() for k in data.k], [v.double() for v in data.v]
    return data


def _draw_heads(data: LayerData, case: Case, index: int, b: int, length: int) -> None:
    layer = case.layers[index]
    source = _prefix_source(case, b)
    for name, width, scale in (("k", layer.dim, layer.k_scale), ("v", layer.value_dim, layer.v_scale)):
        raw = _normal(case, f"{name}{index}.{b}", (length, layer.kv_heads, width))
        if source is not None and not layer.cross:
            raw[:source] = _normal(case, f"{name}{index}.shared", (source, layer.kv_heads, width))
        units = _exact(raw / scale, case)
        true = units.double() * scale
        passed = true.to(_torch(case.dtype))
        getattr(data, f"{name}_units").append(units)
        getattr(data, f"{name}_true").append(true)
        getattr(data, name).append(passed)


def _draw_latent(data: LayerData, case: Case, index: int, b: int, length: int) -> None:
    layer = case.layers[index]
    raw = _normal(case, f"k{index}.{b}", (length, 1, layer.latent + layer.rope))
    units = _exact(raw / layer.k_scale, case)
    true = units.double() * layer.k_scale
    data.k_units.append(units)
    data.k_true.append(true)
    data.v_true.append(true[..., : layer.latent])
    data.latent.append(true.squeeze(1).to(_torch(case.dtype)))


def hide_before(data: LayerData, layer: LayerCase, b: int, first: int) -> None:
    """Make the positions that no query of a request may see huge; in what the pool holds and in the truth alike."""
    if first <= 0:
        return
    for name, scale in (("k", layer.k_scale), ("v", layer.v_scale)):
        units = getattr(data, f"{name}_units")
        if not units:
            continue
        filler = huge(units[b][:first].shape, units[b].dtype, units[b].device)
        raw_bytes(units[b])[:first] = raw_bytes(filler)
        true = units[b][:first].double() * scale
        getattr(data, f"{name}_true")[b][:first] = true
    if layer.kind is Kind.MLA and data.v_true[b].shape[-1] == layer.latent:
        data.v_true[b][:first] = data.k_true[b][:first, :, : layer.latent]


def raw_bytes(x: Tensor) -> Tensor:
    """Return a view that can be indexed and assigned on every device: one-byte dtypes as uint8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def shared_prefix(case: Case) -> int:
    """Return how many positions all requests share: whole pages of the shortest prefix; 0 unless the case says so."""
    return min(case.prefix) // case.page * case.page if case.place == "shared" else 0


def _prefix_source(case: Case, b: int) -> int | None:
    return shared_prefix(case) or None


def _exact(x: Tensor, case: Case) -> Tensor:
    """Round so that the pool's dtype and the model's both hold the value."""
    pool, dtype = _torch(case.pool_dtype), _torch(case.dtype)
    if pool.itemsize == 1:
        limit = torch.finfo(pool).max
        return x.clamp(-limit, limit).to(pool)
    return x.to(pool).to(dtype).to(pool)


def _normal(case: Case, name: str, shape: Sequence[int]) -> Tensor:
    seed = zlib.crc32(f"{case.seed}/{name}".encode())
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def _torch(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
