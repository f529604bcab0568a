"""The section ``[backend.torch_native]`` of a configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TorchNativeOptions(BaseModel):
    """Options of the reference backend. None changes what is computed, only how much memory it takes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_gather_tokens: int = Field(default=8192, ge=1)
    """Most key rows that one call gathers for several requests at once; a single longer request is gathered whole."""
    max_score_cells: int = Field(default=1 << 22, ge=1 << 10)
    """Most scores, or mask cells of a fused call, that a request has in memory; long query blocks are cut by it."""
