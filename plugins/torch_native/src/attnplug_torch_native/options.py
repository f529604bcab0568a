"""The section ``[backend.torch_native]`` of a configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TorchNativeOptions(BaseModel):
    """Options of the reference backend. None changes what is computed, only how much memory it takes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_gather_tokens: int = Field(default=8192, ge=1)
    """Most key rows that one call gathers for several requests at once; a single longer request is gathered whole."""
    max_graph_context_len: int = Field(default=8192, ge=0)
    """Longest context that is served from graphs: a captured step reads as many keys of each request as it may ever
    have, so that beyond some length an eager step, which reads those there are, is faster. 0: no graphs."""
    max_score_cells: int = Field(default=1 << 22, ge=1 << 10)
    """Most scores, or mask cells of a fused call, that a request has in memory; long query blocks are cut by it."""
