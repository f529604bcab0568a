"""Worlds for tests: requests with logical keys and values scattered into a pool, and dense attention over them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from attnplug.assembly.env import BackendEnv, Limits
from attnplug.attention_io import AttentionExtras, AttentionOutput
from attnplug.batch import ForwardBatch
from attnplug.kv.pools import MHAKVPool, MLAKVPool
from attnplug.kv.quant import dequantize, quantize
from attnplug.kv.translator import KVIndexTranslator
from attnplug.layer import AttentionLayer
from attnplug.model_spec import LayerSpec, ModelSpec
from attnplug.modes import AttentionType, ForwardMode, KVSpace
from attnplug.spec import Kind
from attnplug.spec_info import SpecInfo
from attnplug_torch_native.backend import TorchNativeBackend
from attnplug_torch_native.options import TorchNativeOptions

F64 = torch.float64


def dense(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, scale: float, cap: float = 0.0, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend q [t, Hq, D] to k [n, Hk, D], v [n, Hk, Dv] under visible [t, n]; out, and the LSE without sinks."""
    q, k, v = q.to(F64), k.to(F64), v.to(F64)
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=F64)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=F64)
    for h in range(q.shape[1]):
        s = q[:, h] @ k[:, h // group].T * scale
        if cap:
            s = cap * torch.tanh(s / cap)
        for i in range(q.shape[0]):
            seen = visible[i].nonzero().flatten()
            if not len(seen):
                continue
            row = s[i, seen]
            lse[i, h] = torch.logsumexp(row, 0)
            total = lse[i, h] if sinks is None else torch.logaddexp(lse[i, h], sinks[h].to(F64))
            out[i, h] = torch.exp(row - total) @ v[seen, h // group].to(F64)
    return out, lse


def rule(layer: LayerSpec, mode: ForwardMode, t: int, n: int) -> Tensor:
    """Return who sees what, [t, n], from positions: the queries are the last t of n."""
    p, key = torch.arange(n - t, n)[:, None], torch.arange(n)[None]
    if layer.is_cross_attention:
        return torch.ones(t, n, dtype=torch.bool)
    causal = layer.attn_type is AttentionType.DECODER and mode is not ForwardMode.DLLM_EXTEND
    seen = key <= p if causal else torch.ones(t, n, dtype=torch.bool)
    w = layer.sliding_window_size
    return seen & ((p - key).abs() <= w) if w >= 0 else seen


@dataclass
class World:
    """One layer's requests. ``lens`` are the KV positions after the step, ``new`` the queries of each request."""

    layer: LayerSpec
    lens: tuple[int, ...]
    new: tuple[int, ...]
    mode: ForwardMode = ForwardMode.EXTEND
    dtype: torch.dtype = F64
    kv_dtype: torch.dtype | None = None
    page_size: int = 1
    layout: str = "NHD"
    runs: bool = False
    """Whether each request's pages follow each other."""
    seed: int = 0
    k_scale: float = 1.0
    v_scale: float = 1.0
    sinks: Tensor | None = None
    encoder_lens: tuple[int, ...] | None = None
    num_padding: int = 0
    exact: bool = True
    spec_info: SpecInfo | None = None
    device: str = "cpu"
    deterministic: bool = False
    options: TorchNativeOptions = field(default_factory=TorchNativeOptions)
    poison: float = float("nan")
    max_context: int = 1 << 20

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        kv_dtype = self.kv_dtype or self.dtype
        layer, page = self.layer, self.page_size
        mla = layer.kind is Kind.MLA
        heads = 1 if mla else layer.num_kv_heads
        width = layer.kv_lora_rank + layer.qk_rope_head_dim if mla else layer.head_dim
        v_width = layer.kv_lora_rank if mla else layer.v_head_dim
        read = self.encoder_lens if layer.is_cross_attention else self.lens
        assert read is not None

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=F64).to(self.dtype)

        self.k = [rand(n, heads, width) for n in read]
        self.v = [k[..., :v_width] for k in self.k] if mla else [rand(n, heads, v_width) for n in read]
        self.nothing = (rand(0, heads, width), rand(0, heads, v_width))
        self.q = rand(sum(self.new), layer.num_heads, width)
        pages = [-(-n // page) for n in read]
        make = MLAKVPool if mla else MHAKVPool
        extra = {} if mla else {"layout": self.layout}
        space = KVSpace.ENCODER if layer.is_cross_attention else KVSpace.FULL
        self.pool = make(
            [layer], num_pages=sum(pages) + 3, page_size=page, dtype=kv_dtype, device=self.device, space=space, **extra
        )
        order = torch.arange(sum(pages)) + 1
        if not self.runs:
            order = torch.randperm(sum(pages) + 2, generator=g) + 1
        starts = [0, *accumulate(pages)]
        columns = max([*self.lens, *(self.encoder_lens or ()), 1]) + page + 3
        self.table = torch.full((len(read) + 1, columns), 2**30, dtype=torch.int32)
        self.table[0] = 0
        self.slots = []
        for b, n in enumerate(read):
            mine = order[starts[b] : starts[b + 1]]
            slots = (mine[:, None] * page + torch.arange(page)).flatten()[:n]
            self.slots.append(slots)
            self.table[b + 1, :n] = slots.to(torch.int32)
        self.module = AttentionLayer.from_spec(layer, sinks=self.sinks, k_scale=self.k_scale, v_scale=self.v_scale)
        self._fill_pool()
        self._make_batch()

    def _fill_pool(self) -> None:
        """Poison every slot; then store what is cached before the step."""
        layer, keys_of = self.layer, self.pool.get_kv_buffer(self.layer.layer_id)
        for buffer in keys_of:
            buffer.fill_(self.poison)
        for b, slots in enumerate(self.slots):
            cached = len(slots) if layer.is_cross_attention else len(slots) - self.new[b]
            self._store(b, slots[:cached], cached)

    def _store(self, b: int, slots: Tensor, count: int) -> None:
        mla = self.layer.kind is Kind.MLA
        k = quantize(self.k[b][:count], self.k_scale, self.pool.dtype)
        v = quantize(self.v[b][:count], self.v_scale, self.pool.dtype)
        keys, values = self.pool.get_kv_buffer(self.layer.layer_id)
        pairs = [(keys, k)] if mla else [(keys, k), (values, v)]
        for buffer, rows in pairs:
            if buffer.dtype.itemsize == 1:
                buffer, rows = buffer.view(torch.uint8), rows.view(torch.uint8)
            if self.layout == "HND":
                buffer[slots // self.page_size, :, slots % self.page_size] = rows.to(buffer.device)
            else:
                buffer[slots] = rows.to(buffer.device)

    def _make_batch(self) -> None:
        dev, layer, verify = self.device, self.layer, self.mode is ForwardMode.TARGET_VERIFY
        table = self.table.to(dev)
        kw = {"encoder_req_to_token": table} if layer.is_cross_attention else {}
        full = torch.zeros_like(table) if layer.is_cross_attention else table
        self.translator = KVIndexTranslator(self.pool, full, **kw)
        b = len(self.lens)
        rows = torch.arange(1, b + 1)
        if self.num_padding:
            rows[b - self.num_padding :] = 0
        rows = rows.to(dev)
        loc = [torch.zeros(0, dtype=torch.int64)]
        pos = [torch.zeros(0, dtype=torch.int64)]
        for i, (n, t) in enumerate(zip(self.lens, self.new, strict=True)):
            pads = i >= b - self.num_padding or layer.is_cross_attention
            loc.append(torch.zeros(t, dtype=torch.int64) if pads else self.slots[i][n - t :])
            pos.append(torch.arange(n - t, n))
        out_loc = torch.cat(loc).to(dev)
        plan = self.translator.plan(req_pool_indices=rows, out_cache_loc=out_loc)
        lens = torch.tensor([n - (t if verify else 0) for n, t in zip(self.lens, self.new, strict=True)])
        lens = lens.to(torch.int64)
        host = lens if self.exact else lens + 5
        extending = self.mode.is_extend
        prefix = [n - t for n, t in zip(self.lens, self.new, strict=True)]

        def i32(xs: list[int]) -> Tensor:
            return torch.tensor(xs, dtype=torch.int32, device=dev)

        self.batch = ForwardBatch(
            forward_mode=self.mode,
            batch_size=b,
            num_padding=self.num_padding,
            req_pool_indices=rows,
            seq_lens=lens.to(dev),
            seq_lens_cpu=host,
            seq_lens_cpu_exact=self.exact,
            seq_lens_sum=int(host.sum()),
            max_seq_len=int(host.max()) if b else 0,
            positions=torch.cat(pos).to(dev),
            out_cache_loc=out_loc,
            extend_seq_lens=i32(list(self.new)) if extending else None,
            extend_prefix_lens=i32(prefix) if extending else None,
            extend_start_loc=i32([0, *accumulate(self.new)][:b]) if extending else None,
            extend_seq_lens_cpu=tuple(self.new) if extending else None,
            extend_prefix_lens_cpu=tuple(prefix) if extending else None,
            extend_num_tokens=sum(self.new) if extending else 0,
            encoder_lens=None if self.encoder_lens is None else torch.tensor(self.encoder_lens, device=dev),
            encoder_lens_cpu=self.encoder_lens,
            spec_info=self.spec_info,
            kv_loc_plan=plan,
        )
        self.env = BackendEnv(
            device=torch.device(dev),
            dtype=self.dtype,
            kv_dtype=self.pool.dtype,
            page_size=self.page_size,
            req_to_token=full,
            kv_pool=self.pool,
            translator=self.translator,
            model_spec=ModelSpec(name="test", layers=(layer,), dtype="float64", max_context_len=self.max_context),
            limits=Limits(max_batch_size=512, max_num_tokens=1 << 16, max_context_len=self.max_context),
            deterministic=self.deterministic,
        )
        self.backend = TorchNativeBackend(self.env, self.options)

    def new_rows(self, which: list[Tensor]) -> Tensor:
        """Return this step's own keys or values, [T, Hk, width]."""
        parts = [self.nothing[0 if which is self.k else 1]]
        parts += [x[n - t :] for x, n, t in zip(which, self.lens, self.new, strict=True)]
        return torch.cat(parts).to(self.device)

    def run(self, *, save: bool = True, extras: AttentionExtras | None = None) -> AttentionOutput:
        """Compile metadata, and run the layer with this step's rows."""
        self.backend.init_forward_metadata(self.batch)
        q = self.q.to(self.device)
        if self.layer.is_cross_attention:
            return self.backend.forward(q, None, None, self.module, self.batch, False, extras)
        k, v = self.new_rows(self.k), self.new_rows(self.v)
        return self.backend.forward(q, k, v, self.module, self.batch, save, extras)

    def stored(self, x: Tensor, scale: float) -> Tensor:
        """Return rows as the pool gives them back, float64."""
        return dequantize(quantize(x, scale, self.pool.dtype), scale, F64)

    def expect(self, visible: list[Tensor] | None = None, *, sinks: bool = True) -> tuple[Tensor, Tensor]:
        """Return the oracle's out and LSE over the whole batch; requests of padding give zeros."""
        outs, lses, row = [], [], 0
        for b, t in enumerate(self.new):
            q = self.q[row : row + t]
            row += t
            k, v = self.stored(self.k[b], self.k_scale), self.stored(self.v[b], self.v_scale)
            seen = rule(self.layer, self.mode, t, len(k)) if visible is None else visible[b]
            if b >= len(self.new) - self.num_padding:
                seen = torch.zeros_like(seen)
            out, lse = dense(
                q, k, v, seen, scale=self.layer.scaling, cap=self.layer.logit_cap, sinks=self.sinks if sinks else None
            )
            outs.append(out)
            lses.append(lse)
        if not outs:
            outs.append(torch.zeros(0, self.layer.num_heads, self.layer.v_head_dim, dtype=F64))
            lses.append(outs[0][..., 0])
        return torch.cat(outs), torch.cat(lses)


def layer(**kw: object) -> LayerSpec:
    """Return a small softmax layer; anything can be changed."""
    base: dict[str, object] = {"layer_id": 0, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "v_head_dim": 16}
    merged = {**base, "scaling": 0.25, **kw}
    return LayerSpec(**merged)  # type: ignore[arg-type]


def assert_exact(got: Tensor, want: Tensor) -> None:
    """Compare results of float64 math."""
    torch.testing.assert_close(got.cpu().to(F64), want, rtol=1e-6, atol=1e-9)
