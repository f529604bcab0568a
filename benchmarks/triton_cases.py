"""The Triton backend's GPU cases: shapes, the bytes and operations that each must move and do, and its floor."""

from __future__ import annotations

from dataclasses import dataclass, replace

BYTES_PER_US = 4.3e6
"""4.3 TB/s: copy bandwidth of an H200, read and write counted."""
FLOP_PER_US = 790e6
"""790 TFLOP/s: a power-throttled 8192³ bf16 product."""


def zipf_lengths(count: int, low: int, high: int) -> list[int]:
    """Return lengths that fall off like 1/rank from ``high`` to ``low``."""
    return [max(low, min(high, int(high / (i + 1)))) for i in range(count)]


@dataclass(frozen=True)
class BenchCase:
    name: str
    heads: int
    kv_heads: int
    dim: int
    lens: tuple[int, ...]
    queries: tuple[int, ...] = ()
    """Empty: decode."""
    window: int = -1
    sinks: bool = False
    rope: int = 0
    kv: str = "bfloat16"

    @property
    def batch(self) -> int:
        return len(self.lens)

    @property
    def query_lens(self) -> tuple[int, ...]:
        return self.queries or (1,) * self.batch

    @property
    def key_bytes(self) -> int:
        """Bytes of one position's keys and values."""
        size = 1 if self.kv.startswith("float8") else 2
        return size * (self.dim + self.rope if self.rope else 2 * self.kv_heads * self.dim)

    @property
    def bytes(self) -> int:
        read = sum(min(n, self.window + q) if self.window >= 0 else n for n, q in zip(self.lens, self.query_lens))
        tokens = sum(self.query_lens)
        return read * self.key_bytes + tokens * self.heads * (2 * self.dim + self.rope) * 2

    @property
    def flops(self) -> int:
        total = 0
        for n, q in zip(self.lens, self.query_lens, strict=True):
            seen = q * (n - q) + q * (q + 1) // 2
            if self.window >= 0:
                seen = min(seen, q * (self.window + 1))
            total += seen
        return 2 * self.heads * total * (2 * self.dim + self.rope)

    @property
    def floor_us(self) -> float:
        return max(self.bytes / BYTES_PER_US, self.flops / FLOP_PER_US)


def uniform(name: str, heads: int, kv_heads: int, dim: int, batch: int, length: int, **more: object) -> BenchCase:
    return BenchCase(name, heads, kv_heads, dim, (length,) * batch, **more)  # type: ignore[arg-type]


K = 1024
ZIPF = tuple(zipf_lengths(64, 256, 32 * K))
DECODE = (
    uniform("llama B1 8k", 32, 8, 128, 1, 8 * K),
    uniform("llama B1 32k", 32, 8, 128, 1, 32 * K),
    uniform("llama B1 128k", 32, 8, 128, 1, 128 * K),
    uniform("llama B8 8k", 32, 8, 128, 8, 8 * K),
    uniform("llama B64 1k", 32, 8, 128, 64, 1 * K),
    uniform("llama B64 8k", 32, 8, 128, 64, 8 * K),
    uniform("llama B256 1k", 32, 8, 128, 256, 1 * K),
    BenchCase("llama B64 zipf", 32, 8, 128, ZIPF),
    uniform("qwen3 B1 32k", 64, 4, 128, 1, 32 * K),
    uniform("qwen3 B8 32k", 64, 4, 128, 8, 32 * K),
    uniform("qwen3 B64 8k", 64, 4, 128, 64, 8 * K),
    uniform("gpt-oss full+sinks B64 8k", 64, 8, 64, 64, 8 * K, sinks=True),
    uniform("gpt-oss window+sinks B64 8k", 64, 8, 64, 64, 8 * K, sinks=True, window=127),
    uniform("llama fp8 B64 8k", 32, 8, 128, 64, 8 * K, kv="float8_e4m3fn"),
    uniform("mla128 B1 32k", 128, 1, 512, 1, 32 * K, rope=64),
    uniform("mla128 B8 8k", 128, 1, 512, 8, 8 * K, rope=64),
    uniform("mla128 B64 8k", 128, 1, 512, 64, 8 * K, rope=64),
    uniform("mla16 B64 8k", 16, 1, 512, 64, 8 * K, rope=64),
)
EXTEND = (
    uniform("prefill 2k", 32, 8, 128, 1, 2 * K, queries=(2 * K,)),
    uniform("prefill 8k", 32, 8, 128, 1, 8 * K, queries=(8 * K,)),
    uniform("extend 2k over 30k", 32, 8, 128, 1, 32 * K, queries=(2 * K,)),
    BenchCase("mixed 2k chunk + 63 decodes", 32, 8, 128, (2 * K, *(8 * K,) * 63), (2 * K, *(1,) * 63)),
    uniform("verify chain W4 B8 8k", 32, 8, 128, 8, 8 * K, queries=(4,) * 8),
)


def small(case: BenchCase) -> BenchCase:
    """Return a case of the same kernels that is quick to run, for compiling."""
    return replace(case, lens=tuple(min(n, 300) for n in case.lens), queries=tuple(min(q, 64) for q in case.queries))
