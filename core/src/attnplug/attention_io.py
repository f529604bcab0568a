"""What goes into a layer's call beside q, k and v, and what comes out: typed, so that rows can be narrowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from torch import Tensor

from .modes import MlaForm


class AttentionOutput(NamedTuple):
    """One layer's result."""

    out: Tensor
    """[T, Hq, Dv] normalised, the model's dtype; absorbed MLA: [T, Hq, C]."""
    lse: Tensor | None = None
    """[T, Hq] float32, natural log, without sinks; only where it was asked for."""
    aux: Mapping[str, Tensor] | None = None
    """Further results by name, such as an indexer's output."""


_QUERY = {"rows": "query"}
_KV = {"rows": "kv"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionExtras:
    """Optional inputs of a layer's call. Fields of query rows have T rows, those of KV rows as many as k."""

    return_lse: bool = False
    """Ask for the LSE; sinks are then left out of output and LSE, so that states merge, and the caller applies them."""
    mla_form: MlaForm | None = None
    """Which form an MLA layer is computed in; required for MLA layers."""
    q_nope: Tensor | None = field(default=None, metadata=_QUERY)
    """Absorbed MLA: queries in the latent space, [T, Hq, C]."""
    q_rope: Tensor | None = field(default=None, metadata=_QUERY)
    """Absorbed MLA: rotated part of the queries, [T, Hq, R]."""
    latent: Tensor | None = field(default=None, metadata=_KV)
    """MLA: new latent rows to store, [T, C]."""
    k_rope: Tensor | None = field(default=None, metadata=_KV)
    """MLA: new rotated key rows to store, [T, R]."""
    chunk_indptr: Tensor | None = None
    """CHUNKED_PREFIX: [B + 1] int64 device; request b's rows of k and v are chunk_indptr[b] … chunk_indptr[b + 1]."""
    chunk_lens_cpu: tuple[int, ...] | None = None
    """CHUNKED_PREFIX: the same lengths on the host, one a request."""
    topk_indices: Tensor | None = field(default=None, metadata=_QUERY)
    """Sparse attention: positions or blocks to read, [T, K] int32, -1 where fewer."""
    idx_q: Tensor | None = field(default=None, metadata=_QUERY)
    """Sparse attention: the indexer's queries."""
    idx_k: Tensor | None = field(default=None, metadata=_KV)
    """Sparse attention: the indexer's new keys."""
    idx_v: Tensor | None = field(default=None, metadata=_KV)
    """Sparse attention: the indexer's new values."""

    def narrow(self, query: slice, kv: slice) -> AttentionExtras:
        """Return the part that belongs to some query rows and some KV rows; tensors are views."""
        changes = {}
        for one in fields(self):
            rows = one.metadata.get("rows")
            value = getattr(self, one.name)
            if rows is not None and value is not None:
                changes[one.name] = value[query if rows == "query" else kv]
        return replace(self, **changes)
