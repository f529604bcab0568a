"""Two backends for one model: one serves prefill, the other decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from ..attention_io import AttentionExtras, AttentionOutput
from ..backend import AttentionBackend
from ..batch import ForwardBatch
from ..layer import AttentionLayer
from ..modes import ForwardMode
from .composite import CompositeBackend


class HybridAttnBackend(CompositeBackend):
    """Route a step by its mode: decode and idle to one side, target-verify as configured, all else to the other.

    Args:
        prefill: Serves prefill modes.
        decode: Serves decode and idle.
        speculative_attention_mode: Which side serves target-verify.
    """

    def __init__(
        self,
        prefill: AttentionBackend,
        decode: AttentionBackend,
        *,
        speculative_attention_mode: Literal["prefill", "decode"] = "decode",
    ) -> None:
        super().__init__((prefill, decode))
        self.prefill_backend, self.decode_backend = prefill, decode
        self.speculative_attention_mode = speculative_attention_mode
        self.prefill_attention_backend_str = prefill.prefill_attention_backend_str or prefill.name
        self.decode_attention_backend_str = decode.decode_attention_backend_str or decode.name

    def select(self, mode: ForwardMode) -> AttentionBackend:
        """Return the side that serves a mode."""
        if mode.is_decode_or_idle:
            return self.decode_backend
        if mode.is_target_verify and self.speculative_attention_mode == "decode":
            return self.decode_backend
        return self.prefill_backend

    def serving(self, mode: ForwardMode) -> Sequence[AttentionBackend]:
        return (self.select(mode),)

    def serving_graphs(self) -> Sequence[AttentionBackend]:
        # Decode steps are captured, and verify steps where this side serves them.
        sides = (self.decode_backend, self.select(ForwardMode.TARGET_VERIFY))
        return tuple(dict.fromkeys(sides))

    def child_for(self, layer_id: int, mode: ForwardMode) -> AttentionBackend:
        return self.select(mode)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        extras: AttentionExtras | None = None,
    ) -> AttentionOutput:
        # The side gets the whole batch, so nothing is looked up: this is the commonest wrapper of the hot path.
        return self.select(batch.forward_mode).forward(q, k, v, layer, batch, save_kv_cache, extras)
