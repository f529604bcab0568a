"""From a step's plan to the tensors of a ``ForwardBatch``: packed on the host, one copy to the device."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnplug.batch import ForwardBatch
from attnplug.kv.translator import KVIndexTranslator
from attnplug.modes import ForwardMode

from .encoder_batch import EncoderStep, encoder_fields, make_encoder_step
from .pages import RequestTable
from .scheduler import ScheduledRows, StepPlan

__all__ = ["Ahead", "BatchBuilder", "StepInputs"]


class StepInputs(NamedTuple):
    """What one forward of the model takes."""

    batch: ForwardBatch
    input_ids: Tensor
    """[T] int64, device."""
    logits_rows: Tensor
    """[n] int64, device: the token rows after which a token is chosen."""
    encoder: EncoderStep | None = None
    """What the encoder does before it; None where it brings no new request of an encoder-decoder."""


class Ahead(NamedTuple):
    """Tokens of the step before, which the device has chosen and the host does not know yet."""

    ids: Tensor
    """[n] int64, device."""
    places: Mapping[int, int]
    """Of each request, by its id, the place of its token."""


class BatchBuilder:
    """Fills batches from plans.

    Args:
        table: Slots of the requests' positions.
        translator: Plans reads and writes of the pool.
        device: Where the batch is.
        encoder_table: Slots of the encoder's rows, where the model has an encoder.
    """

    def __init__(
        self,
        table: RequestTable,
        translator: KVIndexTranslator,
        device: torch.device,
        encoder_table: RequestTable | None = None,
    ) -> None:
        self._table, self._translator, self._device = table, translator, device
        self._encoder_table = encoder_table

    def build(self, plan: StepPlan, ahead: Ahead | None = None) -> StepInputs:
        """Return a step's inputs; the device tensors are views of one buffer that nothing overwrites.

        Args:
            plan: The step's work.
            ahead: Where rows get the tokens that the host does not know; None where it knows all.
        """
        rows = plan.rows
        counts = [row.num_tokens for row in rows]
        ends = list(accumulate(counts))
        b, t = len(rows), ends[-1]
        sampled = [end - 1 for row, end in zip(rows, ends) if row.samples]
        is_decode = plan.mode is ForwardMode.DECODE
        fed = [(end - 1, row.request.request_id) for row, end in zip(rows, ends) if row.is_ahead]
        given = 3 * t + 2 * b + len(sampled)
        wide, narrow = given + 2 * len(fed), 0 if is_decode else 3 * b
        host = torch.empty(wide + (narrow + 1) // 2, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        packed = host.numpy()
        seq_lens = [row.start + row.num_tokens for row in rows]
        packed[3 * t : 3 * t + b] = [row.request.row for row in rows]
        packed[3 * t + b : 3 * t + 2 * b] = seq_lens
        packed[3 * t + 2 * b : given] = sampled
        if ahead is not None and fed:
            packed[given : given + len(fed)] = [row for row, _ in fed]
            packed[given + len(fed) : wide] = [ahead.places[request_id] for _, request_id in fed]
        if is_decode:
            self._fill_decode(packed, rows)
        else:
            self._fill_extend(packed, rows, t)
            narrow_view = packed[wide:].view(np.int32)
            narrow_view[:b] = counts
            narrow_view[b : 2 * b] = [row.start for row in rows]
            narrow_view[2 * b : 3 * b] = [end - count for end, count in zip(ends, counts)]
        device = host.to(self._device, non_blocking=True)
        input_ids, positions, slots = device[:t], device[t : 2 * t], device[2 * t : 3 * t]
        if ahead is not None and fed:
            input_ids[device[given : given + len(fed)]] = ahead.ids[device[given + len(fed) : wide]]
        row_ids = device[3 * t : 3 * t + b]
        extend = {} if is_decode else self._extend_fields(device[wide:].view(torch.int32), rows, counts, t)
        requests, crossing = [row.request for row in rows], dict[str, Any]()
        if self._encoder_table is not None:
            crossing = encoder_fields(requests, self._encoder_table, self._device)
        batch = ForwardBatch(
            forward_mode=plan.mode,
            batch_size=b,
            req_pool_indices=row_ids,
            seq_lens=device[3 * t + b : 3 * t + 2 * b],
            seq_lens_cpu=host[3 * t + b : 3 * t + 2 * b],
            seq_lens_sum=sum(seq_lens),
            max_seq_len=max(seq_lens),
            positions=positions,
            out_cache_loc=slots,
            kv_loc_plan=self._translator.plan(
                req_pool_indices=row_ids,
                out_cache_loc=slots,
                encoder_out_cache_loc=crossing.get("encoder_out_cache_loc"),
            ),
            **extend,
            **crossing,
        )
        encoder = make_encoder_step(requests, self._translator, self._device) if crossing else None
        return StepInputs(batch, input_ids, device[3 * t + 2 * b : given], encoder)

    def _fill_decode(self, packed: npt.NDArray[np.int64], rows: list[ScheduledRows]) -> None:
        b = len(rows)
        packed[:b] = [0 if row.is_ahead else row.request.tokens[row.start] for row in rows]
        packed[b : 2 * b] = [row.start for row in rows]
        packed[2 * b : 3 * b] = self._table.host[packed[3 * b : 4 * b], packed[b : 2 * b]]

    def _fill_extend(self, packed: npt.NDArray[np.int64], rows: list[ScheduledRows], t: int) -> None:
        at = 0
        for request, start, count in rows:
            stop = start + count
            known = request.tokens[start:stop]
            packed[at : at + len(known)], packed[at + len(known) : at + count] = known, 0
            packed[t + at : t + at + count] = np.arange(start, stop)
            packed[2 * t + at : 2 * t + at + count] = self._table.host[request.row, start:stop]
            at += count

    @staticmethod
    def _extend_fields(narrow: Tensor, rows: list[ScheduledRows], counts: list[int], t: int) -> dict[str, Any]:
        b = len(rows)
        return {
            "extend_seq_lens": narrow[:b],
            "extend_prefix_lens": narrow[b : 2 * b],
            "extend_start_loc": narrow[2 * b : 3 * b],
            "extend_seq_lens_cpu": tuple(counts),
            "extend_prefix_lens_cpu": tuple(row.start for row in rows),
            "extend_num_tokens": t,
        }
