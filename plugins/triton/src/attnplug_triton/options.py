"""The section ``[backend.triton]`` of a configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TritonOptions(BaseModel):
    """Options of the Triton backend. None changes what is computed beyond the order of sums."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_kv_splits: int = Field(default=256, ge=1, le=1024)
    """Most shares that one request's keys are split into where every request gets as many."""
    ragged: Literal["auto", "always", "never"] = "auto"
    """When the batch's keys are shared out evenly over the card, whoever they belong to (stream-K): 'auto' where
    lengths differ, and in graphs, whose lengths are not known at capture. Uniform batches lose 4 to 30 %
    by it (H200)."""
    merge_overlap: bool = True
    """Let the merge of partial results start while their kernel ends (programmatic dependent launch, since Hopper)."""
    hopper_kernels: bool = True
    """Run extend and MLA decode over whole pages in the Gluon kernels, where card, shape and Triton's version are those
    they were proven on; else in the plain kernels, which have the same results."""
