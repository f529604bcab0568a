"""Which decode kernel runs a call, and how: the Hopper MLA one where it was proven, else the plain one."""

from __future__ import annotations

from attnplug.assembly.env import BackendEnv

from .extend_path import Call, has_gluon
from .kernels.args import Keys, Rules
from .kernels.decode_launch import Partials, decode_attention
from .kernels.version import INTERPRETED
from .metadata import DecodePlan, TritonMetadata
from .options import TritonOptions


class DecodePath:
    """Launches decode and verify calls of one width.

    Args:
        env: Where the backend runs.
        capability: Compute capability of the device, as 90; 0 on a CPU.
        options: Overlap, and whether the Hopper kernels may be used.
    """

    def __init__(self, env: BackendEnv, capability: int, options: TritonOptions) -> None:
        self._hopper = has_gluon(capability, options) and not env.deterministic
        self._pdl = options.merge_overlap and capability >= 90 and not INTERPRETED

    def run(self, call: Call, step: TritonMetadata, rules: Rules, source: Keys, plan: DecodePlan) -> None:
        """Attend a call's rows to a pool; its outputs are written."""
        partials = None
        if plan.schedule.partials:
            assert step.attn_logits is not None  # made with the plan
            assert step.attn_lse is not None
            partials = Partials(step.attn_logits, step.attn_lse)
        if self._hopper and call.q_rope is not None:
            from .kernels import mla_hopper_launch as hopper

            if hopper.takes(call.q, source, rules, call.widths, step.query_len, plan.schedule):
                hopper.mla_hopper(
                    call.q,
                    call.q_rope,
                    source,
                    rules,
                    schedule=plan.schedule,
                    partials=partials,
                    out=call.out,
                    lse=call.lse,
                )
                return
        decode_attention(
            call.q,
            source,
            rules,
            call.widths,
            query_len=step.query_len,
            schedule=plan.schedule,
            tile=plan.tile,
            partials=partials,
            out=call.out,
            lse=call.lse,
            q_rope=call.q_rope,
            pdl=self._pdl,
        )
