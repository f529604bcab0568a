"""Which tile, how many warps and stages, and how many splits: pure functions of shapes, measured on an H200."""

from __future__ import annotations

from typing import NamedTuple

from .args import Widths, next_power


class TileConfig(NamedTuple):
    """How one program is compiled."""

    rows: int
    """Rows of M."""
    keys: int
    """Keys a tile."""
    warps: int
    stages: int


class Schedule(NamedTuple):
    """How a decode step's keys are shared among programs."""

    kind: str
    """'single': a program a request and head; 'equal': each request in the same number of shares; 'fixed': shares of
    one size, so that a request's result does not depend on the batch; 'stream': the batch's tiles in equal shares."""
    splits: int
    """Shares a request; of the whole batch for 'stream'."""
    partials: int
    """Partial results that may be written."""


FIXED_SPLIT_TOKENS = 2048
"""A share of the batch-invariant schedule. 128k contexts make 64 of them."""
STREAM_EXTRA = 4
"""What a request costs beside its tiles, in tiles: 3 to 4 µs of latency. Left out, Zipf lengths cost 138 for 118 µs."""
SHARED_PER_SM = 227 * 1024
"""Bytes of shared memory that programs of one multiprocessor have (Hopper)."""


def decode_tile(widths: Widths, query_rows: int, itemsize: int, programs: int, sms: int, stored: int = 2) -> TileConfig:
    """Return the tile of a decode launch.

    Args:
        widths: Head widths.
        query_rows: Rows a KV head: the group's heads times the queries of a request.
        itemsize: Bytes of a query element.
        programs: Programs of the launch, to choose stages so that the last wave is full.
        sms: Multiprocessors.
        stored: Bytes of a stored element.
    """
    widest = max(next_power(widths.d), next_power(widths.dv))
    rows = min(next_power(query_rows), 64)
    if widths.latent:
        # 128 heads: 64 × 64 with the latent as one operand, 213 registers at 8 warps, no spill, 221 KB. 16 heads: two
        # programs a multiprocessor; half the keys and a third stage read 3.8 instead of 3.9 TB/s.
        return TileConfig(rows, 64 if itemsize == 2 else 16, 8 if rows >= 32 else 4, 2)
    if itemsize > 2:
        return TileConfig(min(rows, 32), 32 if widest <= 128 else 16, 4, 2)
    keys = 64 if widest <= 128 else 32
    warps = 2 if rows <= 16 else 4
    return TileConfig(rows, keys, warps, _stages(keys * (widths.d + widths.dv) * stored, programs, sms))


def _stages(tile_bytes: int, programs: int, sms: int) -> int:
    """Return 3 stages, or 2 where only those let every program be resident at once instead of in a part-filled wave.

    512 programs of Llama: 478 µs at 2 stages, 548 at 3; of head width 64, which all fit at 3: 242 at 3, 269 at 2; 2048
    programs, which never fit: 250 at 3, 259 at 2 (H200, 64 requests of 8k, 256 of 1k).
    """
    deep, shallow = (SHARED_PER_SM // (tile_bytes * buffers + 6 * 1024) * sms for buffers in (2, 1))
    return 2 if deep < programs <= shallow else 3


def programs_per_sm(tile: TileConfig) -> int:
    """Return how many programs of a tile a multiprocessor is given: those of eight warps fill it alone."""
    return 1 if tile.warps == 8 else 2


def extend_tile(widths: Widths, query_rows: int, itemsize: int, *, short: bool = False) -> TileConfig:
    """Return the tile of an extend launch.

    Args:
        widths: Head widths.
        query_rows: Most rows a KV head: the group's heads times a request's queries.
        itemsize: Bytes of a query element.
        short: Whether many requests have few queries, as decodes beside a chunk: their tiles are mostly padding.
    """
    widest = max(next_power(widths.d), next_power(widths.dv))
    if widths.latent:
        return TileConfig(min(next_power(query_rows), 64), 32, 8, 2)
    if itemsize > 2:
        return TileConfig(min(next_power(query_rows), 64 if widest <= 128 else 32), 32 if widest <= 128 else 16, 4, 2)
    rows = min(next_power(query_rows), 128)
    if widest > 128:
        return TileConfig(min(rows, 64), 32, 4 if rows <= 32 else 8, 2)
    # A 2k chunk beside 63 decodes at 8k: 629 µs in tiles of 64 rows, 801 of 128; but 8k of prefill: 1410 and 1210.
    rows = min(rows, 64) if short else rows
    return TileConfig(rows, 64, 4 if rows <= 64 else 8, 3)


def decode_schedule(
    *,
    batch_size: int,
    heads: int,
    max_tiles: int,
    sms: int,
    max_splits: int,
    deterministic: bool,
    ragged: bool,
    keys: int,
    per_sm: int = 2,
) -> Schedule:
    """Return how a decode step is shared out. Lengths stay on the device: bounds of the host are enough.

    Args:
        batch_size: Requests.
        heads: Programs a request without splits: KV heads times row blocks.
        max_tiles: Tiles of the longest request, or a bound.
        sms: Multiprocessors.
        max_splits: Most shares a request.
        deterministic: Ask for shares that do not depend on the batch.
        ragged: Whether lengths differ much.
        keys: Keys a tile.
        per_sm: Programs to start on a multiprocessor; see ``programs_per_sm``.
    """
    tiles = max(max_tiles, 1)
    if deterministic:
        splits = -(-tiles // max(FIXED_SPLIT_TOKENS // keys, 1))
        return Schedule("fixed", splits, batch_size * splits)
    # Two programs a multiprocessor fill the memory's queue; more only cost merging (B1 32k: 33 splits, 66 lose 4 %).
    wanted = max(per_sm * sms // max(heads, 1), 1)
    if ragged and batch_size > 1 and tiles > 2:
        # Four programs a multiprocessor of two stages hide a segment's start better than two of three: 164 for 170 µs.
        return Schedule("stream", wanted * 2, wanted * 2 + batch_size)
    splits = min(max(round(wanted / batch_size), 1), max_splits, max(tiles // 2, 1))
    if splits == 1:
        return Schedule("single", 1, 0)
    return Schedule("equal", splits, batch_size * splits)
