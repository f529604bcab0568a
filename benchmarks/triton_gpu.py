"""Time the Triton backend's kernels on a GPU, each against its floor and a float32 answer, in CUDA-graph replays.

    python benchmarks/triton_gpu.py --json out.json --seconds 150 [--variants] [--warm 14]

``--warm n`` compiles in n processes first; ``--variants`` times other tiles and schedules beside the chosen ones.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import triton
from triton_cases import DECODE, EXTEND, BenchCase

from attnplug_triton.kernels.args import Keys, Rules, Table, Widths
from attnplug_triton.kernels.config import (
    Schedule,
    TileConfig,
    decode_schedule,
    decode_tile,
    extend_tile,
    programs_per_sm,
)
from attnplug_triton.kernels.decode_launch import Partials, decode_attention
from attnplug_triton.kernels.extend_launch import Queries, extend_attention, row_tiles

ROTATE_BYTES = 300e6
MOST_POOLS = 10
HOPPER = True
"""Whether the Gluon kernels are timed; see --no-hopper."""


class Data:
    """A case's tensors: pools to rotate through, and one table for all."""

    def __init__(self, case: BenchCase, page: int, pools: int) -> None:
        self.case, self.page, device = case, page, "cuda"
        g = torch.Generator(device=device).manual_seed(1)
        need = [-(-n // page) for n in case.lens]
        count = (sum(need) + 1) * page
        order = 1 + torch.randperm(sum(need), generator=g, device=device)
        width = max(need) * page
        ids = torch.zeros((case.batch + 1, width), dtype=torch.int32, device=device)
        taken = 0
        for b, n in enumerate(need):
            mine = order[taken : taken + n]
            ids[b + 1, : n * page] = (mine[:, None] * page + torch.arange(page, device=device)).reshape(-1).int()
            taken += n
        self.table = Table(ids, torch.arange(1, case.batch + 1, device=device), 1, page)
        self.lens = torch.tensor(case.lens, device=device)
        tokens = sum(case.query_lens)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=g, device=device, dtype=torch.bfloat16)

        self.q = draw(tokens, case.heads, case.dim)
        self.q_rope = draw(tokens, case.heads, case.rope) if case.rope else None
        self.pools: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(pools):
            k = draw(count, case.kv_heads, case.dim + case.rope)
            v = k[..., : case.dim] if case.rope else draw(count, case.kv_heads, case.dim)
            if case.kv != "bfloat16":
                k, v = k.to(getattr(torch, case.kv)), v.to(getattr(torch, case.kv))
            self.pools.append((k, v))
        self.sinks = torch.randn(case.heads, generator=g, device=device) if case.sinks else None
        self.rules = Rules((case.dim + case.rope) ** -0.5, window=case.window, sinks=self.sinks)
        self.widths = Widths(case.dim, case.dim, case.rope)
        self.out = torch.empty_like(self.q)
        self.query_lens = torch.tensor(case.query_lens, dtype=torch.int32, device=device)

    def keys(self, pool: int) -> Keys:
        return Keys(*self.pools[pool], self.table, self.lens)

    def error(self) -> float:
        """Return ‖out − true‖ / ‖true‖ over up to three requests, for the last pool."""
        case, rows, worst = self.case, 0, 0.0
        chosen = {0, case.batch // 2, case.batch - 1}
        for b, (n, count) in enumerate(zip(case.lens, case.query_lens, strict=True)):
            if b in chosen:
                worst = max(worst, self._error(b, n, rows, count))
            rows += count
        return worst

    def _error(self, b: int, n: int, row: int, count: int) -> float:
        case = self.case
        k, v = (x[self.table.ids[b + 1, :n].long()].float() for x in self.pools[-1])
        q = self.q if self.q_rope is None else torch.cat([self.q, self.q_rope], -1)
        group, total, off = case.heads // case.kv_heads, 0.0, 0.0
        step = max(1, (1 << 28) // (n * case.heads))
        for start in range(0, count, step):
            stop = min(start + step, count)
            part = q[row + start : row + stop].float().unflatten(1, (case.kv_heads, group))
            s = torch.einsum("thgd,shd->thgs", part, k) * self.rules.scaling
            at = torch.arange(n - count + start, n - count + stop, device="cuda")[:, None, None, None]
            key = torch.arange(n, device="cuda")
            hidden = key > at
            if case.window >= 0:
                hidden |= at - key > case.window
            s.masked_fill_(hidden, float("-inf"))
            lse = torch.logsumexp(s, -1)
            if self.sinks is not None:
                lse = torch.logaddexp(lse, self.sinks.view(case.kv_heads, group))
            true = torch.einsum("thgs,shd->thgd", torch.exp(s - lse[..., None]), v).flatten(1, 2)
            off += float((self.out[row + start : row + stop].float() - true).square().sum())
            total += float(true.square().sum())
        return (off / total) ** 0.5


def graph_us(call: Any, pools: int, repeats: int) -> float:
    """Return the median microseconds of one call, from replays of a graph that runs through the pools."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(repeats):
            call(i % pools)
        call(pools - 1)
    times = []
    for _ in range(4):
        graph.replay()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    while len(times) < 15 or (len(times) < 40 and time.perf_counter() - begun < 0.25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (repeats + 1))
        if time.perf_counter() - begun > 1.0:
            break
    return statistics.median(times)


def decode_choices(case: BenchCase, page: int, variants: bool) -> dict[str, Any]:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    width = case.query_lens[0]
    rows = width * case.heads // case.kv_heads
    widths = Widths(case.dim, case.dim, case.rope)
    stored = getattr(torch, case.kv).itemsize
    one = decode_tile(widths, rows, 2, case.batch * case.kv_heads, sms, stored)
    programs = case.kv_heads * -(-rows // one.rows)
    longest = max(case.lens)
    if case.window >= 0:
        longest = min(longest, case.window + 1)

    def plan(ragged: bool) -> tuple[TileConfig, Schedule]:
        tiles = 1 if 0 <= case.window < 1024 else -(-longest // one.keys)
        schedule = decode_schedule(
            batch_size=case.batch, heads=programs, max_tiles=tiles, sms=sms, max_splits=256, deterministic=False,
            ragged=ragged, keys=one.keys, per_sm=programs_per_sm(one),
        )  # fmt: skip
        launched = programs * schedule.splits * (1 if schedule.kind == "stream" else case.batch)
        return decode_tile(widths, rows, 2, launched, sms, stored), schedule

    ragged = max(case.lens) * case.batch > 1.5 * sum(case.lens) and longest > 1024
    choices: dict[str, Any] = {"chosen": plan(ragged and programs_per_sm(one) > 1)}
    if HOPPER and case.rope and case.heads % 64 == 0 and page % 64 == 0:
        choices = {"hopper": (None, choices["chosen"][1])} | choices
    if not variants:
        return choices
    tile, schedule = choices["chosen"]
    if case.rope:
        tiles = [TileConfig(tile.rows, 32, 4, 3), TileConfig(tile.rows, 64, 4, 2), TileConfig(tile.rows, 64, 4, 3)]
        if case.heads == 128:
            tiles = [TileConfig(64, 64, 8, 2)]
    else:
        tiles = [
            TileConfig(16, 64, 2, 2),
            TileConfig(16, 64, 2, 3),
            TileConfig(16, 128, 4, 3),
            TileConfig(16, 32, 4, 4),
        ]
        tiles = [t._replace(rows=tile.rows) for t in tiles]
    for t in tiles:
        choices[f"{schedule.kind} {t.keys}/{t.warps}w/{t.stages}s"] = (t, schedule)
    if case.batch > 1 and case.window < 0:
        wanted = 2 * sms // programs
        for t, times in ((tiles[0], 2), (tiles[0], 3), (tiles[-1], 2)):
            name = f"stream×{times} {t.keys}/{t.warps}w/{t.stages}s"
            choices[name] = (t, Schedule("stream", wanted * times, wanted * times + case.batch))
    return choices


def run_decode(data: Data, tile: TileConfig | None, schedule: Schedule, pdl: bool, repeats: int) -> float:
    case, width = data.case, data.case.query_lens[0]
    rows = max(schedule.partials, 1) * width * case.heads
    partials = Partials(
        torch.full((rows * case.dim,), float("nan"), device="cuda"), torch.full((rows,), float("nan"), device="cuda")
    )

    def hopper(pool: int) -> None:
        from attnplug_triton.kernels.mla_hopper_launch import mla_hopper

        mla_hopper(data.q, data.q_rope, data.keys(pool), data.rules, schedule=schedule, partials=partials, out=data.out)

    def call(pool: int) -> None:
        if tile is None:
            hopper(pool)
            return
        decode_attention(
            data.q, data.keys(pool), data.rules, data.widths, query_len=width, schedule=schedule, tile=tile,
            partials=partials, out=data.out, q_rope=data.q_rope, pdl=pdl,
        )  # fmt: skip

    data.out.fill_(float("nan"))
    us = graph_us(call, len(data.pools), repeats)
    return us


def extend_choices(case: BenchCase, page: int, variants: bool) -> dict[str, Any]:
    group = case.heads // case.kv_heads
    short = 2 * row_tiles(case.query_lens, group, 128) * 128 > 3 * sum(case.query_lens) * group and case.batch > 1
    tile = extend_tile(Widths(case.dim, case.dim), max(case.query_lens) * group, 2, short=short)
    choices: dict[str, Any] = {"plain": (tile, None)}
    if HOPPER and page % 64 == 0:
        choices = {"hopper": ()} | choices
    if variants:
        for t, registers in ((TileConfig(128, 64, 8, 3), None), (TileConfig(64, 64, 4, 3), None)):
            choices[f"{t.rows}×{t.keys}/{t.warps}w/{t.stages}s/{registers or 'free'}"] = (t, registers)
    return choices


def run_hopper(data: Data, repeats: int) -> float:
    from attnplug_triton.kernels.extend_hopper_launch import extend_hopper

    case = data.case

    def call(pool: int) -> None:
        extend_hopper(
            data.q, data.query_lens, data.rules, data.keys(pool), batch_size=case.batch,
            max_query_len=max(case.query_lens), uniform=0, out=data.out,
        )  # fmt: skip

    data.out.fill_(float("nan"))
    return graph_us(call, len(data.pools), repeats)


def run_extend(data: Data, tile: TileConfig, registers: int | None, repeats: int) -> float:
    case = data.case
    bound = row_tiles(case.query_lens, case.heads // case.kv_heads, tile.rows)

    def call(pool: int) -> None:
        extend_attention(
            data.q, Queries(case.batch, data.query_lens, 0, bound), data.rules, data.widths, keys=data.keys(pool),
            tile=tile, out=data.out, maxnreg=registers,
        )  # fmt: skip

    data.out.fill_(float("nan"))
    return graph_us(call, len(data.pools), repeats)


def overheads() -> dict[str, float]:
    """Return host microseconds of metadata, of an eager layer's call and of its launcher: 64 requests of 8k."""
    from attnplug.assembly.env import BackendEnv, Limits
    from attnplug.batch import ForwardBatch
    from attnplug.kv.pools import MHAKVPool
    from attnplug.kv.translator import KVIndexTranslator
    from attnplug.layer import AttentionLayer
    from attnplug.model_spec import LayerSpec, ModelSpec
    from attnplug.modes import ForwardMode
    from attnplug_triton.backend import TritonBackend

    size, length, device = 64, 8192, torch.device("cuda")
    spec = LayerSpec(layer_id=0, num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, scaling=0.088)
    # All requests share pages: time on the host does not depend on it.
    pool = MHAKVPool([spec], num_pages=length // 64, page_size=64, dtype=torch.bfloat16, device=device)
    table = torch.arange(length, dtype=torch.int32, device=device).expand(size + 1, length).contiguous() + 64
    env = BackendEnv(
        device=device,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        page_size=64,
        req_to_token=table,
        kv_pool=pool,
        translator=KVIndexTranslator(pool, table),
        model_spec=ModelSpec(name="bench", layers=(spec,), dtype="bfloat16", max_context_len=length),
        limits=Limits(max_batch_size=size, max_num_tokens=size, max_context_len=length),
    )
    rows, slots = torch.arange(1, size + 1, device=device), torch.arange(64, 64 + size, device=device)
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=size,
        req_pool_indices=rows,
        seq_lens=torch.full((size,), length, device=device),
        seq_lens_sum=size * length,
        max_seq_len=length,
        positions=torch.full((size,), length - 1, device=device),
        out_cache_loc=slots,
        kv_loc_plan=env.translator.plan(req_pool_indices=rows, out_cache_loc=slots),
    )
    backend, layer = TritonBackend(env), AttentionLayer.from_spec(spec)
    q = torch.randn(size, 32, 128, dtype=torch.bfloat16, device=device)
    k = torch.randn(size, 8, 128, dtype=torch.bfloat16, device=device)

    def host_us(call: Any, count: int) -> float:
        call()
        torch.cuda.synchronize()
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            for _ in range(count):
                call()
            times.append((time.perf_counter() - begun) / count * 1e6)
            torch.cuda.synchronize()
        return round(statistics.median(times), 1)

    backend.init_forward_metadata(batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        backend.init_forward_metadata(batch)
        torch.cuda.synchronize()
    step, (tile, schedule) = backend.forward_metadata, next(iter(backend.forward_metadata.plans.values()))[::-1]
    keys = Keys(*pool.get_kv_buffer(0), next(iter(step.tables.values())), batch.seq_lens)
    out, partials = torch.empty_like(q), Partials(step.attn_logits, step.attn_lse)

    rules, widths = Rules(0.088), Widths(128, 128)

    def launch() -> None:
        decode_attention(
            q,
            keys,
            rules,
            widths,
            query_len=1,
            schedule=schedule,
            tile=tile,
            partials=partials,
            out=out,
        )

    return {
        "metadata_host_us": host_us(lambda: backend.init_forward_metadata(batch), 500),
        "metadata_out_graph_host_us": host_us(lambda: backend.init_forward_metadata_out_graph(batch), 500),
        "metadata_gpu_launches": len([e for e in profile.events() if e.device_type.name == "CUDA"]),
        "layer_host_us": host_us(lambda: backend.forward(q, None, None, layer, batch), 100),
        "layer_with_write_host_us": host_us(lambda: backend.forward(q, k, k, layer, batch), 100),
        "launcher_host_us": host_us(launch, 100),
    }


def jobs(variants: bool, pages: tuple[int, ...], only: str) -> list[tuple[BenchCase, int]]:
    return [(case, page) for case in (*DECODE, *EXTEND) for page in pages if only in case.name]


def is_decode(case: BenchCase) -> bool:
    return not case.queries or (len(set(case.queries)) == 1 and case.queries[0] <= 16)


def time_case(case: BenchCase, page: int, variants: bool, quick: bool, deadline: float) -> list[dict[str, Any]]:
    one_pool = case.key_bytes * sum(case.lens)
    pools = 1 if quick else max(1, min(MOST_POOLS, int(ROTATE_BYTES // one_pool) + 1))
    data = Data(case, page, pools)
    repeats = 1 if quick else max(pools, min(30, int(4000 / max(case.floor_us, 20))))
    rows = []
    choices: dict[str, Any] = (
        decode_choices(case, page, variants) if is_decode(case) else extend_choices(case, page, variants)
    )
    for name, choice in choices.items():
        if time.time() > deadline:
            break
        row: dict[str, Any] = {"case": case.name, "page": page, "choice": name, "config": str(choice)}
        try:
            if is_decode(case):
                us = run_decode(data, *choice, pdl=True, repeats=repeats)
            elif name == "hopper":
                us = run_hopper(data, repeats)
            else:
                us = run_extend(data, *choice, repeats=repeats)
            row |= {
                "us": round(us, 2), "floor_us": round(case.floor_us, 1), "of_floor": round(case.floor_us / us, 3),
                "tb_s": round(case.bytes / us / 1e6, 2), "tflop_s": round(case.flops / us / 1e6, 1),
            }  # fmt: skip
            if not quick:
                row["error"] = round(data.error(), 5)
        except (RuntimeError, triton.runtime.errors.OutOfResources) as error:
            row["failed"] = str(error)[:200]
        rows.append(row)
    return rows


def warm(index: int, count: int, variants: bool, pages: tuple[int, ...], only: str, hopper: bool) -> None:
    global HOPPER
    HOPPER = hopper
    torch.set_num_threads(1)
    for case, page in jobs(variants, pages, only)[index::count]:
        time_case(case, page, variants and page > 1, True, time.time() + 300)
        torch.cuda.empty_cache()


def revision() -> str:
    """Return the checkout's commit; empty where there is none."""
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--warm", type=int, default=0)
    parser.add_argument("--pages", default="64,1")
    parser.add_argument("--only", default="")
    parser.add_argument("--no-hopper", action="store_true", help="leave the Gluon kernel out")
    parser.add_argument("--revision", default="", help="where the tree is a copy without its repository")
    args = parser.parse_args()
    global HOPPER
    HOPPER = not args.no_hopper
    pages = tuple(int(page) for page in args.pages.split(","))
    if args.warm:
        context = mp.get_context("spawn")
        workers = [
            context.Process(target=warm, args=(i, args.warm, args.variants, pages, args.only, HOPPER))
            for i in range(args.warm)
        ]
        begun = time.time()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout=max(1.0, 150 - (time.time() - begun)))
            worker.kill()
        print(f"compiled in {time.time() - begun:.0f} s")
    deadline = time.time() + args.seconds
    rows: list[dict[str, Any]] = []
    for case, page in jobs(args.variants, pages, args.only):
        if time.time() > deadline:
            print("the time was up before", case.name, page)
            continue
        found = time_case(case, page, args.variants and page > 1, False, deadline)
        rows += found
        torch.cuda.empty_cache()
        for row in found:
            print(
                f"{row['case']:28s} p{row['page']:<3d} {row['choice']:26s} {row.get('us', '-'):>9} us "
                f"{row.get('of_floor', '-')} of floor {row.get('tb_s', '-')} TB/s {row.get('tflop_s', '-')} TF/s "
                f"err {row.get('error', '-')} {row.get('failed', '')}",
                flush=True,
            )
    facts = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "revision": args.revision or revision(),
        "how": "CUDA-graph replays, pools rotated past 300 MB, median; error against float32 of the last pool",
    }
    args.json.write_text(json.dumps({**facts, "rows": rows}, indent=1))
    host = overheads()
    print(host)
    args.json.write_text(json.dumps({**facts, "host": host, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
