"""A compiled model passes through its attention layers: same numbers, one graph, the pool written as in eager mode."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

from attnplug.attention_io import AttentionExtras
from attnplug.batch import ForwardBatch
from attnplug.context import ForwardContext, forward_context
from attnplug.errors import ContractViolation
from attnplug.layer import AttentionLayer
from attnplug.layer_op import _layers
from attnplug.modes import ForwardMode, MlaForm

from .spike_world import LAYERS, PlanRunBackend, World

HIDDEN = 16
DTYPE = torch.float64


class Block(nn.Module):
    """A decoder layer with Llama's shape: norm, attention, residual, gated feed-forward."""

    def __init__(self, layer: AttentionLayer) -> None:
        super().__init__()
        heads, kv, dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        self.norm, self.norm2 = nn.RMSNorm(HIDDEN, dtype=DTYPE), nn.RMSNorm(HIDDEN, dtype=DTYPE)
        self.qkv = nn.Linear(HIDDEN, (heads + 2 * kv) * dim, bias=False, dtype=DTYPE)
        self.out = nn.Linear(heads * dim, HIDDEN, bias=False, dtype=DTYPE)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False, dtype=DTYPE)
        self.down = nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=DTYPE)
        self.attn = layer

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        layer = self.attn
        q, k, v = self.qkv(self.norm(x)).split(
            [n * layer.head_dim for n in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)], dim=-1
        )
        shape = (x.shape[0], -1, layer.head_dim)
        x = x + self.out(layer(q.view(shape), k.view(shape), v.view(shape), batch).out.flatten(1))
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, layers: list[AttentionLayer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(layer) for layer in layers)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        for block in self.blocks:
            x = block(x, batch)
        return x


def softmax_layers() -> list[AttentionLayer]:
    return [AttentionLayer.from_spec(LAYERS[0]), AttentionLayer.from_spec(LAYERS[2])]


def generate(compiled: Callable[[Model], Callable[..., Tensor]]) -> tuple[list[Tensor], Tensor]:
    """A prefill and four decode steps, each step's input made from the step before; returns outputs and the pool."""
    world = World()
    backend = PlanRunBackend(world.env, "library")
    world.translator.bind_and_verify_backends([backend])
    model = Model(softmax_layers()).eval()
    call = compiled(model)
    lens, outs = [5, 3, 7], []
    x = torch.randn(15, HIDDEN, generator=torch.Generator().manual_seed(5), dtype=DTYPE)
    batch = world.batch(ForwardMode.EXTEND, lens, lens)
    for step in range(5):
        if step:
            lens = [n + 1 for n in lens]
            batch = world.batch(ForwardMode.DECODE, lens, [1] * 3)
            x = outs[-1][-3:].tanh()
        with torch.no_grad(), forward_context(ForwardContext(backend, batch=batch)):
            backend.init_forward_metadata(batch)
            outs.append(call(x, batch))
    return outs, torch.stack([t for i in (0, 2) for t in world.pool.get_kv_buffer(i)])


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("how", BACKENDS)
def test_a_compiled_llama_gives_the_numbers_and_the_pool_of_eager_mode(how: str) -> None:
    torch._dynamo.reset()
    expected, pool = generate(lambda model: model)
    outs, compiled_pool = generate(lambda model: torch.compile(model, backend=how, fullgraph=True, dynamic=True))
    for got, want in zip(outs, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(compiled_pool, pool, rtol=1e-9, atol=1e-9)


def run_compiled(function: Callable[..., Any], *args: Any, batch: bool = True) -> Any:
    torch._dynamo.reset()
    world = World()
    backend = PlanRunBackend(world.env, "library")
    world.translator.bind_and_verify_backends([backend])
    step = world.batch(ForwardMode.DECODE, [3, 4], [1, 1])
    backend.init_forward_metadata(step)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), forward_context(ForwardContext(backend, batch=step if batch else None)):
        return compiled(*args, step), backend, world


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    return tuple(torch.randn(2, n, 8, generator=g, dtype=DTYPE) for n in (4, 2, 2))  # type: ignore[return-value]


def test_a_call_whose_output_is_unused_still_writes_the_pool_and_calls_keep_their_order() -> None:
    first, second = softmax_layers()
    q, k, v = qkv()
    wide = torch.randn(2, 6, 8, dtype=DTYPE)

    def model(q: Tensor, k: Tensor, v: Tensor, wide: Tensor, batch: ForwardBatch) -> Tensor:
        second(wide, k, v, batch)
        first(q, k, v, batch)
        return q + 1

    _, backend, world = run_compiled(model, q, k, v, wide)
    assert backend.calls == [("decode", 2), ("decode", 0)]
    assert world.pool.get_kv_buffer(0)[0].any()


def test_lse_and_extras_pass_through_a_compiled_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[AttentionExtras | None] = []
    layer = softmax_layers()[0]
    q, k, v = qkv()

    def forward(self: PlanRunBackend, q, k, v, layer, batch, save_kv_cache=True, extras=None):
        from attnplug.attention_io import AttentionOutput

        seen.append(extras)
        assert save_kv_cache is False
        return AttentionOutput(q.clone(), torch.zeros(q.shape[:2]))

    monkeypatch.setattr(PlanRunBackend, "forward", forward)

    def model(q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        extras = AttentionExtras(return_lse=True, mla_form=MlaForm.ONE_SHOT, idx_q=q * 2)
        out = layer(q, k, v, batch, False, extras)
        return out.out, out.lse

    (out, lse), _, _ = run_compiled(model, q, k, v)
    assert torch.equal(out, q)
    assert lse.shape == (2, 4)
    assert seen[0] is not None
    assert seen[0].return_lse
    assert seen[0].mla_form is MlaForm.ONE_SHOT
    assert torch.equal(seen[0].idx_q, q * 2)
    assert seen[0].idx_k is None


def test_a_compiled_call_without_a_published_batch_is_refused_with_the_remedy() -> None:
    layer = softmax_layers()[0]
    with pytest.raises(ContractViolation, match="names no batch"):
        run_compiled(lambda q, k, v, batch: layer(q, k, v, batch).out, *qkv(), batch=False)


def test_copies_of_a_layer_are_layers_of_their_own_and_numbers_do_not_keep_layers_alive() -> None:
    layer = softmax_layers()[0]
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    numbers = {one.number for one in (layer, *copies)}
    assert len(numbers) == 3
    assert all(_layers[one.number] is one for one in (layer, *copies))
    number = layer.number
    del layer, copies
    gc.collect()
    assert number not in _layers


def test_a_second_step_compiles_nothing_anew() -> None:
    torch._dynamo.reset()
    layer, compiles = softmax_layers()[0], torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    world = World()
    backend = PlanRunBackend(world.env, "library")
    world.translator.bind_and_verify_backends([backend])
    compiled = torch.compile(lambda q, k, v, batch: layer(q, k, v, batch).out * 2, backend=compiles, fullgraph=True)
    for length in (3, 4, 5):
        step = world.batch(ForwardMode.DECODE, [length, length], [1, 1])
        backend.init_forward_metadata(step)
        with torch.no_grad(), forward_context(ForwardContext(backend, batch=step)):
            compiled(*qkv(), step)
    assert compiles.frame_count == 1
