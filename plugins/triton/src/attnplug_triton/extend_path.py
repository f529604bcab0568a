"""Which extend kernel runs a call, and how: the Hopper one where it was proven and pays, else the plain one."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnplug.assembly.env import BackendEnv
from attnplug.batch import ForwardBatch
from attnplug.layer import AttentionLayer

from .kernels.args import Keys, Rules, Widths
from .kernels.config import extend_tile
from .kernels.extend_launch import NewRows, Queries, extend_attention, row_tiles
from .kernels.version import PROVEN_GLUON, VERSION
from .metadata import TritonMetadata
from .options import TritonOptions

_MANY_QUERIES = 1 << 10


def has_gluon(capability: int, options: TritonOptions) -> bool:
    """Whether the Gluon kernels may run: Gluon's names change between versions, so only where they were proven."""
    return options.hopper_kernels and capability == 90 and VERSION == PROVEN_GLUON


class Call(NamedTuple):
    """One layer's call, with what every path needs."""

    q: Tensor
    """[T, Hq, D], columns contiguous."""
    layer: AttentionLayer
    batch: ForwardBatch
    widths: Widths
    out: Tensor
    """[T, Hq, Dv], written."""
    lse: Tensor | None
    """[T, Hq] float32, written where it is asked for."""
    q_rope: Tensor | None = None


class ExtendPath:
    """Launches extend calls.

    Args:
        env: Where the backend runs.
        capability: Compute capability of the device, as 90; 0 on a CPU.
        options: Whether the Hopper kernel may be used.
    """

    def __init__(self, env: BackendEnv, capability: int, options: TritonOptions) -> None:
        self._deterministic = env.deterministic
        self._hopper = has_gluon(capability, options) and not env.deterministic

    def run(self, call: Call, step: TritonMetadata, rules: Rules, source: Keys | None, new: NewRows | None) -> None:
        """Attend a call's rows to a pool, to rows of the call, or to both; its outputs are written."""
        keys = new if source is None else source
        assert keys is not None  # a call reads keys from somewhere
        group = call.q.shape[1] // keys.k.shape[1]
        if source is not None and new is None and self._try_hopper(call, step, source, rules, group):
            return
        # Batch-invariant results come of one tile for every batch.
        queries = _MANY_QUERIES if self._deterministic else max(step.max_query_len, 1)
        short = not self._deterministic and step.many_short(group)
        tile = extend_tile(call.widths, queries * group, call.q.dtype.itemsize, short=short)
        if step.query_len:
            bound = step.batch_size * -(-step.query_len * group // tile.rows)
        elif step.query_lens_cpu is not None:
            bound = row_tiles(step.query_lens_cpu, group, tile.rows)
        else:
            bound = -(-call.q.shape[0] * group // tile.rows) + step.batch_size
        extend_attention(
            call.q,
            Queries(step.batch_size, step.query_lens, step.query_len, bound),
            rules,
            call.widths,
            keys=source,
            new=new,
            tile=tile,
            out=call.out,
            lse=call.lse,
            q_rope=call.q_rope,
        )

    def _try_hopper(self, call: Call, step: TritonMetadata, keys: Keys, rules: Rules, group: int) -> bool:
        """Run the Hopper kernel where it takes the call and pays: most requests fill its tiles of 128 rows."""
        if not self._hopper or call.layer.is_cross_attention or step.many_short(group):
            return False
        from .kernels import extend_hopper_launch as hopper

        if step.max_query_len * group < hopper.ROWS or not hopper.takes(call.q, keys, rules, call.widths):
            return False
        hopper.extend_hopper(
            call.q,
            step.query_lens,
            rules,
            keys,
            batch_size=step.batch_size,
            max_query_len=step.max_query_len,
            uniform=step.query_len,
            out=call.out,
            lse=call.lse,
        )
        return True
