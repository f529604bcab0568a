"""A model over fakes, run eagerly and from graphs, beside a dense oracle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from attnplug.assembly.env import BackendEnv, Limits
from attnplug.backend import AttentionBackend
from attnplug.batch import ForwardBatch
from attnplug.context import ForwardContext, forward_context
from attnplug.kv.pools import MHAKVPool
from attnplug.kv.translator import KVIndexTranslator
from attnplug.layer import AttentionLayer
from attnplug.model_spec import LayerSpec, ModelSpec
from attnplug.modes import ForwardMode
from attnplug.spec_info import SpecInfo

WINDOW, MAX_CONTEXT, MAX_BS, HIDDEN, HEAD = 3, 24, 6, 12, 8
DTYPE = torch.float64
LAYERS = (
    LayerSpec(layer_id=0, num_heads=4, num_kv_heads=2, head_dim=HEAD, v_head_dim=HEAD, sliding_window_size=WINDOW),
    LayerSpec(layer_id=1, num_heads=6, num_kv_heads=2, head_dim=HEAD, v_head_dim=HEAD),
)


class Weights(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


def _weights() -> list[Weights]:
    g = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=DTYPE) / shape[0] ** 0.5

    return [
        Weights(
            *(random(HIDDEN, n * HEAD) for n in (one.num_heads, one.num_kv_heads, one.num_kv_heads)),
            random(one.num_heads * HEAD, HIDDEN),
        )
        for one in LAYERS
    ]


WEIGHTS = _weights()


class GraphWorld:
    """Requests 1 … MAX_BS over scattered slots, with fixed inputs a position."""

    def __init__(self) -> None:
        self.pool = MHAKVPool(LAYERS, num_pages=200, page_size=1, dtype=DTYPE, device="cpu")
        self.table = torch.zeros(MAX_BS + 1, MAX_CONTEXT, dtype=torch.int32)
        order = torch.randperm(199, generator=torch.Generator().manual_seed(1)) + 1
        self.table[1:] = order[: MAX_BS * MAX_CONTEXT].view(MAX_BS, MAX_CONTEXT).int()
        self.translator = KVIndexTranslator(self.pool, self.table)
        self.env = BackendEnv(
            device=torch.device("cpu"),
            dtype=DTYPE,
            kv_dtype=DTYPE,
            page_size=1,
            req_to_token=self.table,
            kv_pool=self.pool,
            translator=self.translator,
            model_spec=ModelSpec(name="two", layers=LAYERS, dtype="float64", max_context_len=MAX_CONTEXT),
            limits=Limits(max_batch_size=MAX_BS, max_num_tokens=MAX_BS * MAX_CONTEXT, max_context_len=MAX_CONTEXT),
        )
        self.layers = [AttentionLayer.from_spec(layer) for layer in LAYERS]
        g = torch.Generator().manual_seed(3)
        self.tokens = torch.randn(MAX_BS, MAX_CONTEXT, HIDDEN, generator=g, dtype=DTYPE)

    def model(self, inputs: Mapping[str, Tensor], batch: ForwardBatch) -> Tensor:
        x = inputs["x"]
        for layer, w in zip(self.layers, WEIGHTS, strict=True):
            q, k, v = ((x @ m).view(x.shape[0], -1, HEAD) for m in (w.q, w.k, w.v))
            x = x + layer(q, k, v, batch).out.flatten(1) @ w.out
        return x

    def step(
        self, mode: ForwardMode, lens: list[int], new: list[int], requests: list[int] | None = None
    ) -> tuple[dict[str, Tensor], ForwardBatch]:
        """Requests with these lengths after the step, the last ``new`` positions of each being this step's."""
        requests = list(range(len(lens))) if requests is None else requests
        spans = [(r, n - m, n) for r, n, m in zip(requests, lens, new, strict=True)]
        rows = torch.tensor([r + 1 for r in requests], dtype=torch.int64)
        slots = torch.cat([self.table[r + 1, a:b].long() for r, a, b in spans])
        x = torch.cat([self.tokens[r, a:b] for r, a, b in spans])
        verify = mode.is_target_verify
        n = torch.tensor([a if verify else b for _, a, b in spans])
        prefix, extend = [a for _, a, _ in spans], mode.is_extend
        starts = torch.cumsum(torch.tensor(new), 0) - torch.tensor(new)
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(lens),
            req_pool_indices=rows,
            seq_lens=n,
            seq_lens_cpu=n.clone(),
            seq_lens_sum=int(n.sum()),
            max_seq_len=int(n.max()),
            positions=torch.cat([torch.arange(a, b) for _, a, b in spans]),
            out_cache_loc=slots,
            extend_seq_lens=torch.tensor(new, dtype=torch.int32) if extend else None,
            extend_prefix_lens=torch.tensor(prefix, dtype=torch.int32) if extend else None,
            extend_start_loc=starts.int() if extend else None,
            extend_seq_lens_cpu=tuple(new) if extend else None,
            extend_prefix_lens_cpu=tuple(prefix) if extend else None,
            extend_num_tokens=sum(new) if extend else 0,
            spec_info=SpecInfo(new[0]) if verify else None,
            kv_loc_plan=self.translator.plan(req_pool_indices=rows, out_cache_loc=slots),
        )
        return {"x": x}, batch

    def eager(self, backend: AttentionBackend, inputs: Mapping[str, Tensor], batch: ForwardBatch) -> Tensor:
        with torch.no_grad(), forward_context(ForwardContext(backend, batch=batch)):
            backend.init_forward_metadata(batch)
            return self.model(inputs, batch)

    def prefill(self, backend: AttentionBackend, lens: list[int]) -> None:
        self.eager(backend, *self.step(ForwardMode.EXTEND, lens, lens))

    def expected(self, lens: list[int], new: list[int], requests: list[int] | None = None) -> Tensor:
        """The same by one dense pass a request."""
        requests = list(range(len(lens))) if requests is None else requests
        outs = [oracle(self.tokens[r, :n])[n - m :] for r, n, m in zip(requests, lens, new, strict=True)]
        return torch.cat(outs)


def oracle(x: Tensor) -> Tensor:
    n = x.shape[0]
    at = torch.arange(n)
    for layer, w in zip(LAYERS, WEIGHTS, strict=True):
        q, k, v = ((x @ m).view(n, -1, HEAD) for m in (w.q, w.k, w.v))
        seen = at[None, :] <= at[:, None]
        if layer.sliding_window_size >= 0:
            seen &= at[None, :] >= at[:, None] - WINDOW
        wide = layer.num_heads // layer.num_kv_heads
        k, v = k.repeat_interleave(wide, 1), v.repeat_interleave(wide, 1)
        scores = torch.einsum("thd,shd->hts", q, k) * layer.scaling
        out = torch.einsum("hts,shd->thd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)
        x = x + out.flatten(1) @ w.out
    return x
