"""In which form a step computes latent attention, and in which chunks it reads the cached prefix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug.admission import words
from attnplug.batch import ForwardBatch
from attnplug.errors import BackendRejected, Reason
from attnplug.kv.translator import KVIndexTranslator
from attnplug.model_spec import LayerSpec
from attnplug.modes import ForwardMode, KVSpace, MlaForm
from attnplug.spec import BackendSpec, Feature

__all__ = ["LatentForms", "LatentPlan", "PrefixChunk", "plan_chunks"]


@dataclass(frozen=True, slots=True)
class PrefixChunk:
    """A part of the cached prefixes of a step's requests, gathered and expanded at once."""

    slots: Tensor
    """[n] int64, device: pool slots, request after request."""
    indptr: Tensor
    """[B + 1] int64, device: request b's rows are indptr[b] … indptr[b + 1]."""
    lens_cpu: tuple[int, ...]
    """Rows of each request; 0 where it has none here."""


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """One step's."""

    form: MlaForm
    """Of the new tokens: ABSORBED over the pool, or ONE_SHOT over themselves."""
    chunks: tuple[PrefixChunk, ...] = ()
    """With ONE_SHOT: the prefixes, each chunk merged by its LSE."""


class LatentForms:
    """The forms that a deployment's backends leave.

    An absorbed pair of query and key costs 2C + R products a head, an expanded one D + Dv, and expanding a key
    C·(nope + Dv); absorbing a query costs as much as expanding a key. So decode rows are absorbed; prompt rows are
    expanded over themselves; and over a prefix they are where they are enough to pay for its expansion, from 171 a
    request on with DeepSeek's widths (measured over a prefix of 2048 with torch_native on a CPU: 16 rows 42 ms absorbed
    and 309 expanded, 171 rows 490 and 532, 342 rows 1074 and 783). A step of prompt and decode rows is absorbed where
    it can be.

    Args:
        layer: The widths.
        prefill: What serves prompt rows, each backend that does.
        decode: What serves decode rows.

    Raises:
        BackendRejected: A form that some step needs is not declared.
    """

    def __init__(self, layer: LayerSpec, prefill: Iterable[BackendSpec], decode: Iterable[BackendSpec]) -> None:
        nope = layer.head_dim - layer.qk_rope_head_dim
        self._expansion = layer.kv_lora_rank * (nope + layer.v_head_dim)
        self._gain = 2 * layer.kv_lora_rank + layer.qk_rope_head_dim - layer.head_dim - layer.v_head_dim
        reasons: dict[str, list[Reason]] = {}
        self._absorbs = self._one_shot = self._prefixes = True
        for spec in prefill:
            absorbs, one_shot = Feature.MLA_ABSORBED in spec.features, Feature.MLA_ONE_SHOT in spec.features
            prefixes = one_shot and {Feature.MLA_CHUNKED_PREFIX, Feature.LSE} <= spec.features
            self._absorbs, self._one_shot = self._absorbs and absorbs, self._one_shot and one_shot
            self._prefixes = self._prefixes and prefixes
            if not (absorbs or prefixes):
                asked = "mla_absorbed, or mla_one_shot with mla_chunked_prefix and lse (prefill)"
                reasons.setdefault(spec.name, []).append(Reason("mla_forms", asked, words(spec.features)))
        for spec in decode:
            if Feature.MLA_ABSORBED not in spec.features:
                asked = "mla_absorbed (decode)"
                reasons.setdefault(spec.name, []).append(Reason("mla_forms", asked, words(spec.features)))
        if reasons:
            raise BackendRejected(
                "no backend declares the forms that latent attention needs",
                reasons=reasons,
                remedy="run `attnplug explain` to see which installed backend does",
            )

    @property
    def expands_prompts(self) -> bool:
        """Whether prompt rows want another form than decode rows, so that they want steps of their own."""
        return self._one_shot

    def choose(self, batch: ForwardBatch) -> MlaForm:
        """Return the form of a step's new tokens."""
        mode, prefixes = batch.forward_mode, batch.extend_prefix_lens_cpu or ()
        if mode.is_decode_or_idle or (mode is ForwardMode.MIXED and self._absorbs):
            return MlaForm.ABSORBED
        if not any(prefixes):
            return MlaForm.ONE_SHOT if self._one_shot else MlaForm.ABSORBED
        if not (self._prefixes and self._absorbs):
            return MlaForm.ONE_SHOT if self._prefixes else MlaForm.ABSORBED
        pairs = sum(t * p for t, p in zip(batch.query_lens_cpu, prefixes, strict=True))
        return MlaForm.ONE_SHOT if pairs * self._gain > sum(prefixes) * self._expansion else MlaForm.ABSORBED


def plan_chunks(batch: ForwardBatch, translator: KVIndexTranslator, max_tokens: int) -> tuple[PrefixChunk, ...]:
    """Cut the cached prefixes of a step into chunks of at most ``max_tokens`` rows, filled request after request.

    Chunks are cut by host lengths; their slots are packed on the device, without a synchronisation.

    Args:
        batch: An extend step.
        translator: Reads the requests' slots.
        max_tokens: Most rows of a chunk: what bounds the memory of expanded keys and values.
    """
    assert batch.kv_loc_plan is not None  # the engine's batches have one
    prefixes = batch.extend_prefix_lens_cpu or ()
    done = [0] * len(prefixes)
    chunks = []
    while done != list(prefixes):
        room, starts, lens = max_tokens, list(done), []
        for at, total in enumerate(prefixes):
            take = min(room, total - done[at])
            lens.append(take)
            done[at] += take
            room -= take
        host = torch.tensor([starts, lens], dtype=torch.int64, pin_memory=batch.device.type == "cuda")
        device = host.to(batch.device, non_blocking=True)
        narrow = torch.empty(len(lens) + 1, dtype=torch.int32, device=batch.device)
        slots = torch.empty(max_tokens - room, dtype=torch.int64, device=batch.device)
        translator.pack_read_stream(
            batch.kv_loc_plan, seq_lens=device[1], indptr=narrow, out=slots, kv_start_idx=device[0], kind=KVSpace.FULL
        )
        chunks.append(PrefixChunk(slots, narrow.to(torch.int64), tuple(lens)))
    return tuple(chunks)
