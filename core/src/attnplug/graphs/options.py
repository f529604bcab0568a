"""How a runner captures and what it checks."""

from __future__ import annotations

from dataclasses import dataclass

from .inputs import Rows

EVERY_REPLAY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """Options of a graph runner; the defaults are for serving."""

    request_inputs: frozenset[str] = frozenset()
    """Names of the model's inputs that have a row a request; the others have a row a token."""
    output_rows: Rows = Rows.TOKENS
    """What the outputs' rows are."""
    warmups: int = 2
    """Runs before a capture: the first may compile or tune kernels, the last is checked by the lint."""
    glue: bool = False
    """Capture metadata preparation too, where no leaf refuses."""
    pointer_checks: int = 2
    """How many replays of each captured size have their metadata's addresses compared; EVERY_REPLAY for all."""
    strict: bool = False
    """On a GPU: refuse host synchronisation in refresh and replay, and allocation in replay. For tests and doctor."""
