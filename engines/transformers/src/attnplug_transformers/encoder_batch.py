"""Batches of encoders: rows of several inputs packed one after another, and what a decoder's step says of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnplug.batch import ForwardBatch
from attnplug.kv.translator import KVIndexTranslator
from attnplug.modes import ForwardMode

from .encoder_input import EncoderInput
from .pages import RequestTable
from .request import EngineRequest

__all__ = ["EncoderStep", "encoder_fields", "make_encoder_batch", "make_encoder_step"]


class EncoderStep(NamedTuple):
    """What the encoder does before a decoder's step."""

    batch: ForwardBatch
    inputs: tuple[EncoderInput, ...]
    """One a request of ``batch``."""


def make_encoder_batch(lens: Sequence[int], translator: KVIndexTranslator, device: torch.device) -> ForwardBatch:
    """Return a batch whose queries are whole inputs; its layers read its own rows, and nothing is stored.

    Args:
        lens: Rows of each input, at least 1.
        translator: Plans the step; every slot is the sink's.
        device: Where the batch is.
    """
    b, t = len(lens), sum(lens)
    ends = list(accumulate(lens))
    host = torch.empty(2 * b + t, dtype=torch.int64, pin_memory=device.type == "cuda")
    packed = host.numpy()
    packed[:b], packed[b : 2 * b] = lens, [end - n for end, n in zip(ends, lens)]
    packed[2 * b :] = np.concatenate([np.arange(n) for n in lens])
    there = host.to(device, non_blocking=True)
    rows = torch.zeros(b, dtype=torch.int64, device=device)
    slots = torch.full((t,), translator.pool.sink_slot, dtype=torch.int64, device=device)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=b,
        req_pool_indices=rows,
        seq_lens=there[:b],
        seq_lens_cpu=host[:b],
        seq_lens_sum=t,
        max_seq_len=max(lens),
        positions=there[2 * b :],
        out_cache_loc=slots,
        extend_seq_lens=there[:b].to(torch.int32),
        extend_prefix_lens=torch.zeros(b, dtype=torch.int32, device=device),
        extend_start_loc=there[b : 2 * b].to(torch.int32),
        extend_seq_lens_cpu=tuple(lens),
        extend_prefix_lens_cpu=(0,) * b,
        extend_num_tokens=t,
        encoder_lens=rows,
        encoder_lens_cpu=(0,) * b,
        kv_loc_plan=translator.plan(req_pool_indices=rows, out_cache_loc=slots),
    )


def make_encoder_step(
    requests: Sequence[EngineRequest], translator: KVIndexTranslator, device: torch.device
) -> EncoderStep | None:
    """Return the encoder's work for the requests of a step whose keys are not in the pool yet; None where all are."""
    inputs = tuple(one.encoder for one in requests if one.encoder is not None and not one.encoded)
    if not inputs:
        return None
    return EncoderStep(make_encoder_batch([one.num_rows for one in inputs], translator, device), inputs)


def encoder_fields(requests: Sequence[EngineRequest], table: RequestTable, device: torch.device) -> dict[str, Any]:
    """Return the encoder's fields of a decoder's ForwardBatch.

    Args:
        requests: One a request of the batch, each with an encoder's input.
        table: Slots of the encoder space.
        device: Where the batch is.
    """
    lens = [0 if one.encoder is None else one.encoder.num_rows for one in requests]
    new = [0 if one.encoded else n for one, n in zip(requests, lens)]
    slots = [table.host[one.row, :n] for one, n in zip(requests, new) if n]
    written: Tensor | None = None
    if slots:
        written = torch.from_numpy(np.concatenate(slots).astype(np.int64)).to(device, non_blocking=True)
    return {
        "encoder_lens": torch.tensor(lens, dtype=torch.int64).to(device, non_blocking=True),
        "encoder_lens_cpu": tuple(lens),
        "encoder_new_lens_cpu": tuple(new),
        "encoder_out_cache_loc": written,
    }
