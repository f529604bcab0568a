"""Small right batches for tests of the schema."""

from __future__ import annotations

from typing import Any

import torch

from attnplug.batch import ForwardBatch
from attnplug.modes import ForwardMode


def decode_batch(lens: list[int], **changes: Any) -> ForwardBatch:
    n = torch.tensor(lens, dtype=torch.int64)
    fields = {
        "forward_mode": ForwardMode.DECODE,
        "batch_size": len(lens),
        "req_pool_indices": torch.arange(1, len(lens) + 1),
        "seq_lens": n,
        "seq_lens_cpu": n.clone(),
        "seq_lens_sum": sum(lens),
        "max_seq_len": max(lens, default=0),
        "positions": n - 1,
        "out_cache_loc": torch.arange(1, len(lens) + 1),
    }
    return ForwardBatch(**{**fields, **changes})


def extend_batch(prefix: list[int], new: list[int], **changes: Any) -> ForwardBatch:
    lens = [a + b for a, b in zip(prefix, new, strict=True)]
    starts = torch.cumsum(torch.tensor(new), 0) - torch.tensor(new)
    fields = {
        "forward_mode": ForwardMode.EXTEND,
        "positions": torch.cat([torch.arange(a, a + b) for a, b in zip(prefix, new, strict=True)]),
        "out_cache_loc": torch.arange(1, sum(new) + 1),
        "extend_seq_lens": torch.tensor(new, dtype=torch.int32),
        "extend_prefix_lens": torch.tensor(prefix, dtype=torch.int32),
        "extend_start_loc": starts.int(),
        "extend_seq_lens_cpu": tuple(new),
        "extend_prefix_lens_cpu": tuple(prefix),
        "extend_num_tokens": sum(new),
    }
    return decode_batch(lens, **{**fields, **changes})
