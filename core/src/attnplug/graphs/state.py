"""A backend's graph state, initialised once however many runners capture over it."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..backend import AttentionBackend
from ..errors import ContractViolation


class GraphMaxima(NamedTuple):
    """What a backend's fixed buffers were sized by."""

    max_bs: int
    max_num_tokens: int


_states: WeakKeyDictionary[AttentionBackend, GraphMaxima] = WeakKeyDictionary()


def ensure_graph_state(backend: AttentionBackend, max_bs: int, max_num_tokens: int) -> None:
    """Call ``init_cuda_graph_state`` unless it was called for maxima at least as large.

    Args:
        backend: The one that steps are published with.
        max_bs: Most requests of a captured step.
        max_num_tokens: Most query tokens of a captured step.

    Raises:
        ContractViolation: The backend serves no graphs; or its state is smaller and graphs may hold its addresses.
    """
    known = _states.get(backend)
    if known is None:
        with torch.inference_mode(False):
            backend.init_cuda_graph_state(max_bs, max_num_tokens)
        _states[backend] = GraphMaxima(max_bs, max_num_tokens)
    elif max_bs > known.max_bs or max_num_tokens > known.max_num_tokens:
        raise ContractViolation(
            f"backend {backend.name!r} has graph buffers for {known.max_bs} requests and {known.max_num_tokens} "
            f"tokens; asked for {max_bs} and {max_num_tokens}",
            remedy="call ensure_graph_state with the largest maxima of all runners before the first of them is made",
        )
