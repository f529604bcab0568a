"""A prefill of nobody: what warm-ups and captures of a prefill run over."""

from __future__ import annotations

from itertools import accumulate

import torch

from ..backend import AttentionBackend
from ..batch import ForwardBatch, LinearState
from ..errors import ContractViolation


def dummy_lens(backend: AttentionBackend, tokens: int, max_requests: int) -> tuple[int, ...]:
    """Return the fewest requests that hold that many new tokens, by their lengths.

    Raises:
        ContractViolation: They would be more requests than may be, or than the request pool has rows where the backend
            is bound by it.
    """
    env = backend.env
    longest = env.limits.max_context_len
    most, bound = max_requests, f"a captured prefill has at most {max_requests} requests"
    rows = env.req_to_token.shape[0]
    if backend.extend_dummy_seqs_capped_by_req_pool and rows < most:
        most, bound = rows, f"{backend.name} is bound by the request pool's {rows} rows"
    count = -(-tokens // longest)
    if count > most:
        raise ContractViolation(
            f"a prefill of {tokens} tokens needs {count} requests of {longest} positions; {bound}",
            remedy="leave out token buckets of that size",
        )
    return (*(longest,) * (count - 1), tokens - longest * (count - 1))


def dummy_prefill(example: ForwardBatch, lens: tuple[int, ...], *, sink_slot: int) -> ForwardBatch:
    """Return a batch like the example whose requests are padding: row 0, no prefix, every write to the sink.

    Args:
        example: Whose mode, spaces and state it has.
        lens: New tokens of each request.
        sink_slot: The pool's.
    """
    device, b, tokens = example.device, len(lens), sum(lens)
    sinks = torch.full((tokens,), sink_slot, dtype=torch.int64, device=device)
    rows = torch.zeros(b, dtype=torch.int64, device=device)
    mirror = torch.tensor(lens, dtype=torch.int64)
    plan, state = example.kv_loc_plan, None
    if plan is not None:
        plan = type(plan)(plan.translator_id, rows, {space: sinks for space in plan.write_slots}, plan.layer_spaces)
    if example.state is not None:
        tracked = example.state.track_slots is not None
        nobody = torch.full((b,), -1, dtype=torch.int32, device=device)
        state = LinearState(
            slots=nobody,
            has_initial_state=torch.zeros(b, dtype=torch.bool, device=device),
            track_slots=nobody if tracked else None,
            track_lens=rows if tracked else None,
        )
    return ForwardBatch(
        forward_mode=example.forward_mode,
        logical_forward_mode=example.logical_forward_mode,
        batch_size=b,
        num_padding=b,
        req_pool_indices=rows,
        seq_lens=mirror.to(device),
        seq_lens_cpu=mirror,
        seq_lens_sum=tokens,
        max_seq_len=max(lens),
        positions=torch.cat([torch.arange(n, device=device) for n in lens]),
        out_cache_loc=sinks,
        extend_seq_lens=mirror.to(device, torch.int32),
        extend_prefix_lens=torch.zeros(b, dtype=torch.int32, device=device),
        extend_start_loc=torch.tensor([0, *accumulate(lens)][:-1], dtype=torch.int32, device=device),
        extend_seq_lens_cpu=lens,
        extend_prefix_lens_cpu=(0,) * b,
        extend_num_tokens=tokens,
        encoder_lens=None if example.encoder_lens is None else rows,
        encoder_lens_cpu=None if example.encoder_lens is None else (0,) * b,
        kv_loc_plan=plan,
        state=state,
    )
