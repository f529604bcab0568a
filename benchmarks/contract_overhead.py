"""What the contract costs a layer: AttentionLayer → context → dispatch → forward_decode, over the direct call.

The backend's kernel does nothing, so that only the way to it is timed. Run: python benchmarks/contract_overhead.py;
writes benchmarks/results/contract_overhead.json.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import _report
import torch

from attnplug.assembly.env import BackendEnv, Limits
from attnplug.attention_io import AttentionExtras, AttentionOutput
from attnplug.backend import AttentionBackend
from attnplug.batch import ForwardBatch
from attnplug.context import ForwardContext, forward_context
from attnplug.kv.pools import MHAKVPool
from attnplug.kv.translator import KVIndexTranslator
from attnplug.layer import AttentionLayer
from attnplug.model_spec import LayerSpec, ModelSpec
from attnplug.modes import ForwardMode
from attnplug.spec import BackendSpec
from attnplug.wrappers.hybrid import HybridAttnBackend

LIMIT_US = 6.0
CALLS, ROUNDS, LAYERS = 3000, 41, 30


class Nothing(AttentionBackend):
    """A backend whose kernel does nothing."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.forward_metadata = None

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        extras: AttentionExtras | None = None,
    ) -> AttentionOutput:
        return AttentionOutput(q)

    forward_extend = forward_decode


def main() -> int:
    torch.set_num_threads(1)
    layers = tuple(
        LayerSpec(layer_id=i, num_heads=9, num_kv_heads=3, head_dim=64, v_head_dim=64, scaling=0.125)
        for i in range(LAYERS)
    )
    env = environment(layers)
    spec = BackendSpec(
        name="nothing",
        device_types=frozenset({"cpu"}),
        dtypes=frozenset({"float32"}),
        kv_dtypes=frozenset({"float32"}),
    )
    one, other = Nothing(spec, env), Nothing(spec, env)
    modules = [AttentionLayer.from_spec(layer) for layer in layers]
    batch = decode_batch(4)
    q, k, v = torch.zeros(4, 9, 64), torch.zeros(4, 3, 64), torch.zeros(4, 3, 64)
    ways: dict[str, tuple[AttentionBackend, Callable[[AttentionLayer], Any]]] = {
        "direct": (one, lambda layer: one.forward_decode(q, k, v, layer, batch)),
        "contract": (one, lambda layer: layer(q, k, v, batch)),
        "contract, prefill and decode apart": (HybridAttnBackend(one, other), lambda layer: layer(q, k, v, batch)),
    }
    rounds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        # Interleaved, so that what else the machine does falls on all alike.
        for name, (backend, call) in ways.items():
            with forward_context(ForwardContext(backend)):
                rounds[name].append(microseconds(call, modules))
    medians = {name: statistics.median(values[1:]) for name, values in rounds.items()}
    over = {name: round(medians[name] - medians["direct"], 3) for name in medians if name != "direct"}
    _report.write(
        "contract_overhead",
        {
            "what": f"CPU microseconds a layer call, medians of {ROUNDS} rounds of {CALLS} calls over {LAYERS} layers",
            "medians_us": {name: round(value, 3) for name, value in medians.items()},
            "spread_us": {n: [round(min(values[1:]), 3), round(max(values[1:]), 3)] for n, values in rounds.items()},
            "over_direct_us": over,
            "limit_us": LIMIT_US,
        },
        ("attnplug", "torch"),
    )
    return 0 if max(over.values()) <= LIMIT_US else 1


def microseconds(call: Callable[[AttentionLayer], Any], modules: list[AttentionLayer]) -> float:
    """Return the mean time of a call, over the layers in turn as a model calls them.

    The thread's own time: that of other processes on the same cores is left out.
    """
    repeats = CALLS // len(modules)
    start = time.thread_time()
    for _ in range(repeats):
        for layer in modules:
            call(layer)
    return (time.thread_time() - start) / (repeats * len(modules)) * 1e6


def environment(layers: tuple[LayerSpec, ...]) -> BackendEnv:
    device, dtype = torch.device("cpu"), torch.float32
    pool = MHAKVPool(layers, num_pages=8, page_size=16, dtype=dtype, device=device)
    table = torch.zeros(9, 64, dtype=torch.int32)
    return BackendEnv(
        device=device,
        dtype=dtype,
        kv_dtype=dtype,
        page_size=16,
        req_to_token=table,
        kv_pool=pool,
        translator=KVIndexTranslator(pool, table),
        model_spec=ModelSpec(name="bench", layers=layers, dtype="float32", max_context_len=64),
        limits=Limits(max_batch_size=8, max_num_tokens=64, max_context_len=64),
    )


def decode_batch(size: int) -> ForwardBatch:
    lengths = torch.full((size,), 8, dtype=torch.int64)
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=size,
        req_pool_indices=torch.arange(1, size + 1),
        seq_lens=lengths,
        seq_lens_cpu=lengths.clone(),
        seq_lens_sum=8 * size,
        max_seq_len=8,
        positions=lengths - 1,
        out_cache_loc=torch.arange(16, 16 + size),
    )


if __name__ == "__main__":
    sys.exit(main())
