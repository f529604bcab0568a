"""torch_native on a CPU, beside what a reference backend is usually written as.

Baselines, each writing this step's keys first, as ours does:
decode   for each request: gather its slots, one SDPA with `enable_gqa`.
extend   for each request: gather its slots, queries padded to the KV length, one SDPA, padding cut off: once with
         `is_causal` and once with the causal mask as a tensor.

Ways are interleaved round by round, so that a busy moment of the machine meets all. Written are median and best of
the wall time, and the median of the process CPU time, which other processes change least.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from _report import write
from torch import Tensor

from attnplug.assembly.env import BackendEnv, Limits
from attnplug.batch import ForwardBatch
from attnplug.kv.pools import MHAKVPool
from attnplug.kv.translator import KVIndexTranslator
from attnplug.layer import AttentionLayer
from attnplug.model_spec import LayerSpec, ModelSpec
from attnplug.modes import ForwardMode
from attnplug_torch_native.backend import TorchNativeBackend

HQ, HK, D = 32, 8, 128


class Case:
    """One batch over one layer's pool."""

    def __init__(
        self, mode: ForwardMode, lens: list[int], new: list[int], *, page_size: int, runs: bool, dtype: torch.dtype
    ) -> None:
        torch.manual_seed(0)
        spec = LayerSpec(layer_id=0, num_heads=HQ, num_kv_heads=HK, head_dim=D, v_head_dim=D, scaling=D**-0.5)
        self.lens, self.new = lens, new
        pages = [-(-n // page_size) for n in lens]
        self.pool = MHAKVPool([spec], num_pages=sum(pages), page_size=page_size, dtype=dtype, device="cpu")
        for buffer in self.pool.get_kv_buffer(0):
            buffer.normal_()
        order = torch.arange(sum(pages)) if runs else torch.randperm(sum(pages))
        table = torch.zeros(len(lens) + 1, max(lens), dtype=torch.int32)
        self.slots = []
        for b, n in enumerate(lens):
            mine = order[sum(pages[:b]) : sum(pages[: b + 1])] + 1
            self.slots.append((mine[:, None] * page_size + torch.arange(page_size)).flatten()[:n])
            table[b + 1, :n] = self.slots[b].to(torch.int32)
        translator = KVIndexTranslator(self.pool, table)
        rows = torch.arange(1, len(lens) + 1)
        self.loc = torch.cat([s[n - t :] for s, n, t in zip(self.slots, lens, new, strict=True)])
        extending = mode is not ForwardMode.DECODE
        prefix = [n - t for n, t in zip(lens, new, strict=True)]
        i32 = torch.int32
        self.batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(lens),
            req_pool_indices=rows,
            seq_lens=torch.tensor(lens),
            seq_lens_cpu=torch.tensor(lens),
            seq_lens_sum=sum(lens),
            max_seq_len=max(lens),
            positions=torch.cat([torch.arange(n - t, n) for n, t in zip(lens, new, strict=True)]),
            out_cache_loc=self.loc,
            extend_seq_lens=torch.tensor(new, dtype=i32) if extending else None,
            extend_prefix_lens=torch.tensor(prefix, dtype=i32) if extending else None,
            extend_start_loc=torch.tensor([sum(new[:i]) for i in range(len(new))], dtype=i32) if extending else None,
            extend_seq_lens_cpu=tuple(new) if extending else None,
            extend_prefix_lens_cpu=tuple(prefix) if extending else None,
            extend_num_tokens=sum(new) if extending else 0,
            kv_loc_plan=translator.plan(req_pool_indices=rows, out_cache_loc=self.loc),
        )
        model = ModelSpec(
            name="bench", layers=(spec,), dtype=str(dtype).removeprefix("torch."), max_context_len=1 << 17
        )
        env = BackendEnv(
            device=torch.device("cpu"),
            dtype=dtype,
            kv_dtype=dtype,
            page_size=page_size,
            req_to_token=table,
            kv_pool=self.pool,
            translator=translator,
            model_spec=model,
            limits=Limits(max_batch_size=256, max_num_tokens=1 << 16, max_context_len=1 << 17),
        )
        self.layer, self.backend = AttentionLayer.from_spec(spec), TorchNativeBackend(env)
        total = sum(new)
        self.q = torch.randn(total, HQ, D).to(dtype)
        self.k, self.v = torch.randn(total, HK, D).to(dtype), torch.randn(total, HK, D).to(dtype)

    def plan(self) -> None:
        self.backend.init_forward_metadata(self.batch)

    def ours(self) -> Tensor:
        return self.backend.forward(self.q, self.k, self.v, self.layer, self.batch).out

    def baseline(self, padding: str) -> Tensor:
        """Loop over requests; ``padding`` is 'none' (decode), 'causal' or 'mask'."""
        keys, values = self.pool.get_kv_buffer(0)
        keys[self.loc], values[self.loc] = self.k, self.v
        outs, row = [], 0
        for slots, n, t in zip(self.slots, self.lens, self.new, strict=True):
            q = self.q[row : row + t]
            row += t
            k, v = keys[slots].movedim(0, 1)[None], values[slots].movedim(0, 1)[None]
            if padding == "none":
                out = F.scaled_dot_product_attention(q.movedim(0, 1)[None], k, v, enable_gqa=True)
                outs.append(out[0].movedim(1, 0))
                continue
            padded = torch.zeros(n, HQ, D, dtype=q.dtype)
            padded[n - t :] = q
            heads = padded.movedim(0, 1)[None]
            mask = torch.ones(n, n, dtype=torch.bool).tril() if padding == "mask" else None
            out = F.scaled_dot_product_attention(heads, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
            outs.append(out[0].movedim(1, 0)[n - t :])
        return torch.cat(outs)


def measure(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Return times of each way in milliseconds, interleaved round by round."""
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for call in ways.values():
        call()
    for _ in range(rounds):
        for name, call in ways.items():
            start, used = time.perf_counter(), time.process_time()
            call()
            wall[name].append((time.perf_counter() - start) * 1e3)
            cpu[name].append((time.process_time() - used) * 1e3)
    return {
        name: {
            "median_ms": round(statistics.median(wall[name]), 3),
            "best_ms": round(min(wall[name]), 3),
            "median_cpu_ms": round(statistics.median(cpu[name]), 3),
        }
        for name in ways
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--case", help="only cases whose name holds this")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bf16 = torch.bfloat16
    decode, extend = (ForwardMode.DECODE, [1024] * 8, [1] * 8), (ForwardMode.EXTEND, [4224], [128])
    ragged = (ForwardMode.DECODE, [40 + 7 * (i % 23) for i in range(64)], [1] * 64)
    cases = {
        "decode_b8_kv1k_page1": (*decode, 1, False, ("none",)),
        "decode_b8_kv1k_page16": (*decode, 16, False, ("none",)),
        "decode_b8_kv1k_runs": (*decode, 16, True, ("none",)),
        "decode_b64_kv40_194_page16": (*ragged, 16, False, ("none",)),
        "extend_128_over_4096_page16": (*extend, 16, False, ("causal", "mask")),
    }
    rows = {}
    with torch.inference_mode():
        for name, (mode, lens, new, page, runs, baselines) in cases.items():
            if args.case and args.case not in name:
                continue
            case = Case(mode, lens, new, page_size=page, runs=runs, dtype=bf16)
            case.plan()
            ways: dict[str, Callable[[], object]] = {"metadata": case.plan, "torch_native": case.ours}
            for one in baselines:
                ways[f"baseline_{one}"] = partial(case.baseline, one)
            few = "mask" in baselines
            found: dict[str, object] = dict(measure(ways, max(3, args.rounds // 5) if few else args.rounds))
            gap = (case.ours().float() - case.baseline(baselines[0]).float()).abs().max()
            found["largest_difference"] = float(gap)
            mine = found["torch_native"]
            for one in baselines:
                theirs = found[f"baseline_{one}"]
                ratio = {k: round(theirs[f"{k}_ms"] / mine[f"{k}_ms"], 2) for k in ("median", "best", "median_cpu")}  # type: ignore[index]
                found[f"times_faster_than_{one}"] = ratio
            rows[name] = found
            print(name, json.dumps(found))
    if not args.case:
        report = {
            "what": "milliseconds a call, medians, of one layer; ways interleaved",
            "threads": args.threads,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "load_average_1_5_15": [round(x, 1) for x in os.getloadavg()],
            "shape": "32/8/128 bfloat16",
            "cases": rows,
        }
        write("torch_native_cpu", report, ("attnplug", "attnplug-torch-native", "torch"))


if __name__ == "__main__":
    main()
