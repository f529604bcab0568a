"""What one request gives its encoder."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["EncoderInput"]


@dataclass(frozen=True, slots=True, eq=False)
class EncoderInput:
    """Tokens, or features: one of them."""

    num_rows: int
    """Rows that the encoder makes of it, each with a slot in the encoder space."""
    tokens: tuple[int, ...] = ()
    features: Tensor | None = None
    """As the encoder takes one, without a batch dimension, the model's dtype, device."""
