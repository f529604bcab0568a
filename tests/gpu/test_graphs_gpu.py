"""Graphs on a GPU: replay equals eager, nothing synchronises or allocates, preparation returns while a step runs."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from attnplug.assembly.env import BackendEnv, Limits
from attnplug.backend import AttentionBackend
from attnplug.batch import ForwardBatch
from attnplug.context import ForwardContext, forward_context
from attnplug.errors import ContractViolation
from attnplug.graphs.breakable import BreakableGraphRunner
from attnplug.graphs.buckets import batch_buckets
from attnplug.graphs.device_checks import no_allocation, no_synchronisation
from attnplug.graphs.full import GraphRunner
from attnplug.graphs.options import EVERY_REPLAY, GraphOptions
from attnplug.graphs.overlap import ReadEndFence
from attnplug.kv.pools import MHAKVPool
from attnplug.kv.translator import KVIndexTranslator
from attnplug.layer import AttentionLayer
from attnplug.model_spec import LayerSpec, ModelSpec
from attnplug.modes import ForwardMode, SharedReadEnds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DECODE, EXTEND = ForwardMode.DECODE, ForwardMode.EXTEND
REQUESTS, CONTEXT, HIDDEN, PAGE = 24, 512, 256, 16
LAYERS = tuple(
    LayerSpec(
        layer_id=i,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        v_head_dim=64,
        scaling=0.125,
        sliding_window_size=63 if i == 1 else -1,
    )
    for i in range(3)
)
SLEEP_CYCLES = 400_000_000
"""More than 100 ms at any clock of a data centre's GPU."""


class GpuWorld:
    """A three-layer model with random weights over a pool of scattered pages."""

    def __init__(self) -> None:
        self.device, self.dtype = torch.device("cuda"), torch.bfloat16
        pages = CONTEXT // PAGE
        self.pool = MHAKVPool(LAYERS, num_pages=REQUESTS * pages, page_size=PAGE, dtype=self.dtype, device=self.device)
        g = torch.Generator().manual_seed(1)
        order = (torch.randperm(REQUESTS * pages, generator=g) + 1).view(REQUESTS, pages)
        slots = (order[:, :, None] * PAGE + torch.arange(PAGE)).view(REQUESTS, CONTEXT)
        self.host = torch.cat([torch.zeros(1, CONTEXT, dtype=torch.int64), slots])
        self.table = self.host.to(self.device, torch.int32)
        self.translator = KVIndexTranslator(self.pool, self.table)
        self.env = BackendEnv(
            device=self.device,
            dtype=self.dtype,
            kv_dtype=self.dtype,
            page_size=PAGE,
            req_to_token=self.table,
            kv_pool=self.pool,
            translator=self.translator,
            model_spec=ModelSpec(name="gpu", layers=LAYERS, dtype="bfloat16", max_context_len=CONTEXT),
            limits=Limits(max_batch_size=REQUESTS, max_num_tokens=4096, max_context_len=CONTEXT),
        )
        self.layers = [AttentionLayer.from_spec(layer) for layer in LAYERS]
        self.tokens = torch.randn(REQUESTS, CONTEXT, HIDDEN, generator=g).to(self.device, self.dtype)

        def weight(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, generator=g) / rows**0.5).to(self.device, self.dtype)

        self.weights = [(weight(HIDDEN, (8 + 2 + 2) * 64), weight(8 * 64, HIDDEN)) for _ in LAYERS]

    def model(self, inputs: Mapping[str, Tensor], batch: ForwardBatch) -> Tensor:
        x = inputs["x"]
        for layer, (qkv, out) in zip(self.layers, self.weights, strict=True):
            q, k, v = (x @ qkv).view(x.shape[0], 12, 64).split([8, 2, 2], dim=1)
            x = x + layer(q.contiguous(), k.contiguous(), v.contiguous(), batch).out.reshape(x.shape[0], -1) @ out
        return x

    def step(
        self, mode: ForwardMode, requests: list[int], lens: list[int], new: list[int]
    ) -> tuple[dict[str, Tensor], ForwardBatch]:
        n, rows = torch.tensor(lens), torch.tensor(requests) + 1
        prefix = [a - b for a, b in zip(lens, new, strict=True)]
        spans = list(zip(requests, prefix, lens, strict=True))
        slots = torch.cat([self.host[r + 1, a:b] for r, a, b in spans]).to(self.device)
        rows_on, extend = rows.to(self.device), mode.is_extend
        starts = torch.cumsum(torch.tensor(new), 0) - torch.tensor(new)
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(lens),
            req_pool_indices=rows_on,
            seq_lens=n.to(self.device),
            seq_lens_cpu=n,
            seq_lens_sum=sum(lens),
            max_seq_len=max(lens),
            positions=torch.cat([torch.arange(a, b) for _, a, b in spans]).to(self.device),
            out_cache_loc=slots,
            extend_seq_lens=torch.tensor(new, dtype=torch.int32, device=self.device) if extend else None,
            extend_prefix_lens=torch.tensor(prefix, dtype=torch.int32, device=self.device) if extend else None,
            extend_start_loc=starts.to(self.device, torch.int32) if extend else None,
            extend_seq_lens_cpu=tuple(new) if extend else None,
            extend_prefix_lens_cpu=tuple(prefix) if extend else None,
            extend_num_tokens=sum(new) if extend else 0,
            kv_loc_plan=self.translator.plan(req_pool_indices=rows_on, out_cache_loc=slots),
        )
        return {"x": torch.cat([self.tokens[r, a:b] for r, a, b in spans])}, batch

    def eager(self, backend: AttentionBackend, inputs: Mapping[str, Tensor], batch: ForwardBatch) -> Tensor:
        with torch.no_grad(), forward_context(ForwardContext(backend, batch=batch)):
            backend.init_forward_metadata(batch)
            return self.model(inputs, batch).clone()


def make_backend(name: str, world: GpuWorld) -> AttentionBackend:
    if name == "torch_native":
        from attnplug_torch_native.backend import TorchNativeBackend

        return TorchNativeBackend(world.env)
    pytest.importorskip("attnplug_triton.backend", reason="attnplug-triton is not installed")
    from attnplug_triton.backend import TritonBackend

    return TritonBackend(world.env)


@pytest.fixture(params=["torch_native", "triton"])
def world_and_backend(request: pytest.FixtureRequest) -> tuple[GpuWorld, AttentionBackend]:
    world = GpuWorld()
    backend = make_backend(request.param, world)
    world.translator.bind_and_verify_backends([backend])
    return world, backend


def decode_runner(world: GpuWorld, backend: AttentionBackend, **more) -> GraphRunner:
    options = GraphOptions(pointer_checks=EVERY_REPLAY, **more.pop("options", {"strict": True}))
    buckets = more.pop("buckets", batch_buckets(16))
    return GraphRunner(world.model, backend, buckets=buckets, device=world.device, options=options, **more)


def close(a: Tensor, b: Tensor) -> None:
    # Two orders of the same sums in bfloat16, over three layers.
    torch.testing.assert_close(a.float(), b.float(), rtol=3e-2, atol=3e-2)


def test_replays_equal_eager_over_200_random_steps_without_synchronisation_or_allocation(world_and_backend) -> None:
    world, backend = world_and_backend
    rng = random.Random(3)
    lens = [rng.randint(1, 90) for _ in range(REQUESTS)]
    world.eager(backend, *world.step(EXTEND, list(range(REQUESTS)), lens, lens))
    graphs = decode_runner(world, backend)
    for _ in range(200):
        requests = rng.sample(range(REQUESTS), rng.randint(1, 16))
        for r in requests:
            lens[r] += 1
        inputs, batch = world.step(DECODE, requests, [lens[r] for r in requests], [1] * len(requests))
        replayed = graphs.run(inputs, batch).clone()
        # The eager step writes the same keys over the same slots, so what follows reads no difference.
        close(replayed, world.eager(backend, inputs, batch))


def test_prefill_in_pieces_equals_eager(world_and_backend) -> None:
    world, backend = world_and_backend
    graphs = BreakableGraphRunner(world.model, backend, buckets=(64, 256, 512), max_requests=8, device=world.device)
    rng, lens = random.Random(4), [0] * REQUESTS
    for _ in range(20):
        requests = rng.sample(range(REQUESTS), rng.randint(1, 8))
        new = [rng.randint(1, 50) for _ in requests]
        for r, n in zip(requests, new, strict=True):
            lens[r] += n
        inputs, batch = world.step(EXTEND, requests, [lens[r] for r in requests], new)
        replayed = graphs.run(inputs, batch).clone()
        close(replayed, world.eager(backend, inputs, batch))


def test_preparation_returns_while_the_step_before_it_runs(world_and_backend) -> None:
    world, backend = world_and_backend
    lens = [20] * 8
    world.eager(backend, *world.step(EXTEND, list(range(8)), lens, lens))
    fence = ReadEndFence(world.device)
    graphs = decode_runner(world, backend, buckets=(8,), fence=fence)
    first = world.step(DECODE, list(range(8)), [21] * 8, [1] * 8)
    second = world.step(DECODE, list(range(8)), [22] * 8, [1] * 8)
    expected = [world.eager(backend, *step) for step in (first, second)]
    graphs.run(*first)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(SLEEP_CYCLES)
    started = time.perf_counter()
    one = graphs.run(*first).clone()
    fence.wait()
    two = graphs.run(*second).clone()
    done.record()
    took = time.perf_counter() - started
    assert not done.query(), f"the sleeping kernel had ended before two steps were given, which took {took:.3f} s"
    torch.cuda.synchronize()
    close(one, expected[0])
    close(two, expected[1])


def test_the_scheduler_s_stream_waits_for_the_declared_read_end_only(world_and_backend) -> None:
    world, backend = world_and_backend
    lens = [20] * 8
    world.eager(backend, *world.step(EXTEND, list(range(8)), lens, lens))
    fence = ReadEndFence(world.device)
    graphs = decode_runner(world, backend, buckets=(8,), fence=fence, options={})
    inputs, batch = world.step(DECODE, list(range(8)), [21] * 8, [1] * 8)
    expected, kept = world.eager(backend, inputs, batch), world.table.clone()
    graphs.capture(inputs, batch)
    scheduler = torch.cuda.Stream()
    torch.cuda.synchronize()
    out = graphs.run(inputs, batch).clone()
    fence.wait(scheduler)
    with torch.cuda.stream(scheduler):
        world.table.zero_()
    torch.cuda.synchronize()
    world.table.copy_(kept)
    close(out, expected)
    assert fence.effective in SharedReadEnds


def test_an_in_graph_event_is_reached_inside_the_replay() -> None:
    device = torch.device("cuda")
    from attnplug.graphs.capture import CudaGraphs, capture

    fence, factory = ReadEndFence(device), CudaGraphs(device)
    shared, out = torch.ones(4, device=device), torch.zeros(4, device=device)
    graph = factory.new()
    marked = False

    def body() -> None:
        nonlocal marked
        out.copy_(shared)
        marked = fence.mark(graph)
        torch.cuda._sleep(SLEEP_CYCLES)

    with factory.region():
        out.copy_(shared)
        capture(graph, body)
    if not marked:
        fence.arm(SharedReadEnds.IN_REPLAY, marked=False)
        assert fence.effective is SharedReadEnds.POST_REPLAY
        assert "external" in fence.downgrade
        return
    scheduler, after = torch.cuda.Stream(), torch.cuda.Event()
    fence.arm(SharedReadEnds.IN_REPLAY, marked=True)
    torch.cuda.synchronize()
    graph.replay()
    replayed = torch.cuda.Event()
    replayed.record()
    fence.wait(scheduler)
    with torch.cuda.stream(scheduler):
        shared.zero_()
        after.record()
    after.synchronize()
    assert not replayed.query(), "the scheduler waited for the whole replay"
    torch.cuda.synchronize()
    assert out.eq(1).all(), "the scheduler overwrote before the graph had read"


def test_synchronisation_and_allocation_are_refused_with_what_did_it() -> None:
    device = torch.device("cuda")
    x = torch.ones(4, device=device)
    with (
        pytest.raises(ContractViolation, match="step synchronised with the host"),
        no_synchronisation(device, what="step"),
    ):
        x.sum().item()
    with pytest.raises(ContractViolation, match="step allocated 1 blocks"), no_allocation(device, what="step"):
        torch.zeros(1 << 20, device=device)


def test_conformance_axes_d_and_e_pass_on_the_gpu() -> None:
    from attnplug.testing.runner import run_suite
    from attnplug_torch_native.backend import TorchNativeBackend
    from attnplug_torch_native.spec import SPEC

    report = run_suite(TorchNativeBackend, SPEC, axes=("D", "E"), profile="gpu", device="cuda")
    assert [(result.case, result.message) for result in report.failures] == []
