"""What a batch must satisfy: shapes and dtypes always, values when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .modes import ForwardMode

if TYPE_CHECKING:
    from torch import Tensor

    from .batch import ForwardBatch


def _tensor(name: str, t: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[str]:
    if tuple(t.shape) == shape and t.dtype == dtype and t.device == device:
        return []
    return [f"{name} is {tuple(t.shape)} {t.dtype} on {t.device}; must be {shape} {dtype} on {device}"]


def cheap_problems(batch: ForwardBatch) -> list[str]:
    """Return what is wrong with shapes, dtypes, devices and host numbers; reads no device memory."""
    b, device = batch.batch_size, batch.seq_lens.device
    # One comparison chain for the common, right case: this runs in every step.
    tokens = batch.positions.shape[0]
    problems: list[str] = []
    for name, shape, dtype in (
        ("req_pool_indices", (b,), torch.int64),
        ("seq_lens", (b,), torch.int64),
        ("positions", (tokens,), torch.int64),
        ("out_cache_loc", (tokens,), torch.int64),
    ):
        problems += _tensor(name, getattr(batch, name), shape, dtype, device)
    for name in ("extend_seq_lens", "extend_prefix_lens", "extend_start_loc"):
        value = getattr(batch, name)
        if value is not None:
            problems += _tensor(name, value, (b,), torch.int32, device)
    if batch.encoder_lens is not None:
        problems += _tensor("encoder_lens", batch.encoder_lens, (b,), torch.int64, device)
    if batch.seq_lens_cpu is not None:
        problems += _tensor("seq_lens_cpu", batch.seq_lens_cpu, (b,), torch.int64, torch.device("cpu"))
    for name in ("extend_seq_lens_cpu", "extend_prefix_lens_cpu", "encoder_lens_cpu", "encoder_new_lens_cpu"):
        value = getattr(batch, name)
        if value is not None and len(value) != b:
            problems.append(f"{name} has {len(value)} entries; must have {b}, one a request")
    if not 0 <= batch.num_padding <= b:
        problems.append(f"num_padding is {batch.num_padding}; must be 0 … {b}")
    return problems + _mode_problems(batch, tokens)


def _mode_problems(batch: ForwardBatch, tokens: int) -> list[str]:
    mode, b = batch.forward_mode, batch.batch_size
    if mode is ForwardMode.DECODE:
        return [] if tokens == b else [f"positions has {tokens} rows; decode has one a request, {b}"]
    if mode is ForwardMode.IDLE:
        return []
    if mode is ForwardMode.TARGET_VERIFY:
        if batch.spec_info is None:
            return ["spec_info is None; target-verify needs the draft width"]
        width = batch.spec_info.draft_token_num
        return [] if tokens == b * width else [f"positions has {tokens} rows; must have {b} requests × {width} drafts"]
    problems = [
        f"{name} is None; {mode.value} needs it"
        for name in ("extend_seq_lens", "extend_prefix_lens", "extend_start_loc", "extend_seq_lens_cpu")
        if getattr(batch, name) is None
    ]
    if batch.extend_seq_lens_cpu is not None and sum(batch.extend_seq_lens_cpu) != tokens:
        problems.append(f"extend_seq_lens_cpu sums to {sum(batch.extend_seq_lens_cpu)}; positions has {tokens} rows")
    if batch.extend_num_tokens != tokens:
        problems.append(f"extend_num_tokens is {batch.extend_num_tokens}; positions has {tokens} rows")
    return problems


def full_problems(batch: ForwardBatch, *, num_slots: int | None, max_context_len: int | None) -> list[str]:
    """Return what is wrong with values; copies device tensors to the host."""
    problems = []
    lens = batch.seq_lens.cpu()
    if batch.seq_lens_cpu is not None:
        host = batch.seq_lens_cpu
        wrong = (host != lens) if batch.seq_lens_cpu_exact else (host < lens)
        if bool(wrong.any()):
            rule = "equal to" if batch.seq_lens_cpu_exact else "at least"
            problems.append(f"seq_lens_cpu is {host.tolist()}; must be {rule} seq_lens {lens.tolist()}")
    total, longest = int(lens.sum()), int(lens.max()) if lens.numel() else 0
    for name, value, actual in (
        ("seq_lens_sum", batch.seq_lens_sum, total),
        ("max_seq_len", batch.max_seq_len, longest),
    ):
        if (value != actual) if batch.seq_lens_cpu_exact else (value < actual):
            problems.append(f"{name} is {value}; seq_lens give {actual}")
    if bool((lens < 0).any()):
        problems.append(f"seq_lens has negative lengths: {lens.tolist()}")
    if max_context_len is not None and longest + batch.draft_token_num > max_context_len:
        problems.append(f"seq_lens reaches {longest + batch.draft_token_num}; the context is {max_context_len}")
    slots = batch.out_cache_loc.cpu()
    if num_slots is not None and slots.numel() and bool(((slots < 0) | (slots >= num_slots)).any()):
        problems.append(
            f"out_cache_loc spans {int(slots.min())} … {int(slots.max())}; the pool has 0 … {num_slots - 1}"
        )
    if batch.extend_seq_lens is not None and batch.forward_mode.is_extend:
        problems += _extend_problems(batch, lens)
    return problems


def _extend_problems(batch: ForwardBatch, lens: Tensor) -> list[str]:
    assert batch.extend_seq_lens is not None
    problems = []
    extend = batch.extend_seq_lens.cpu().long()
    if batch.extend_seq_lens_cpu is not None and tuple(extend.tolist()) != batch.extend_seq_lens_cpu:
        problems.append(f"extend_seq_lens_cpu is {batch.extend_seq_lens_cpu}; the device has {extend.tolist()}")
    if batch.extend_prefix_lens is not None:
        prefix = batch.extend_prefix_lens.cpu().long()
        if batch.extend_prefix_lens_cpu is not None and tuple(prefix.tolist()) != batch.extend_prefix_lens_cpu:
            problems.append(
                f"extend_prefix_lens_cpu is {batch.extend_prefix_lens_cpu}; the device has {prefix.tolist()}"
            )
        real = slice(0, batch.batch_size - batch.num_padding)
        if bool((prefix + extend != lens)[real].any()):
            problems.append(
                f"extend_prefix_lens {prefix.tolist()} + extend_seq_lens {extend.tolist()} "
                f"must be seq_lens {lens.tolist()}"
            )
    if batch.extend_start_loc is not None:
        start = batch.extend_start_loc.cpu().long()
        expected = torch.cumsum(extend, 0) - extend
        if bool((start != expected).any()):
            problems.append(
                f"extend_start_loc is {start.tolist()}; the exclusive sum of extend_seq_lens is {expected.tolist()}"
            )
    return problems
