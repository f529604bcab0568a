"""One step over a world: the batch an engine would build, and each layer's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention_io import AttentionExtras
from ..batch import ForwardBatch
from ..masks.verify import TreeMaskMode, VerifyMask
from ..modes import ForwardMode, KVSpace, MlaForm
from ..spec import Kind
from ..spec_info import SpecInfo
from .world import World


class Span(NamedTuple):
    """A request's queries in a step: positions ``start … stop``."""

    request: int
    start: int
    stop: int


class LayerInputs(NamedTuple):
    """What a model passes to one layer."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    extras: AttentionExtras | None


@dataclass(frozen=True, slots=True)
class Step:
    """A batch with where its rows come from."""

    mode: ForwardMode
    spans: tuple[Span, ...]
    batch: ForwardBatch
    trees: tuple[Tensor, ...] = ()
    """Verify by mask: [W, S + W] bool for each request, what its drafts may see."""
    brings_encoder: bool = False

    @property
    def num_rows(self) -> int:
        """Query rows without padding."""
        return sum(span.stop - span.start for span in self.spans)


def case_spans(world: World) -> tuple[Span, ...]:
    """Return the spans of the case's own step."""
    case = world.case
    return tuple(Span(b, p, p + q) for b, (p, q) in enumerate(zip(case.prefix, case.queries, strict=True)))


def make_step(
    world: World,
    *,
    mode: ForwardMode | None = None,
    spans: Sequence[Span] | None = None,
    mask: VerifyMask | None = None,
    trees: Sequence[Tensor] = (),
    parents: Tensor | None = None,
) -> Step:
    """Build a step.

    Args:
        world: Whose requests.
        mode: The case's own by default.
        spans: The case's own by default; the order is the batch's.
        mask: Target-verify of a tree: filled in place, as drafting would.
        trees: What each request's drafts may see, for the mask.
        parents: [B, W] int64: the tree that the mask stands for.
    """
    mode = mode or world.case.mode
    spans = case_spans(world) if spans is None else tuple(spans)
    verify = mode.is_target_verify
    device, placement = world.device, world.placements[KVSpace.FULL]
    ids = torch.tensor([span.request for span in spans], dtype=torch.int64)
    lens = [span.start if verify else span.stop for span in spans]
    widths = tuple(span.stop - span.start for span in spans)
    rows = placement.rows[ids.to(device)]
    seq_lens = torch.tensor(lens, dtype=torch.int64)
    slots = [placement.slots[s.request][s.start : s.stop] for s in spans]
    positions = [torch.arange(s.start, s.stop, device=device) for s in spans]
    if parents is not None:
        depth = tree_depths(parents).to(device)
        positions = [s.start + depth[i] for i, s in enumerate(spans)]
    none = torch.zeros(0, dtype=torch.int64, device=device)
    out_cache_loc = torch.cat([*slots, none])
    fields: dict[str, Any] = {}
    if mode.is_extend:
        starts = torch.cumsum(torch.tensor((0, *widths)), 0)[:-1]
        fields |= {
            "extend_seq_lens": torch.tensor(widths, dtype=torch.int32, device=device),
            "extend_prefix_lens": torch.tensor([s.start for s in spans], dtype=torch.int32, device=device),
            "extend_start_loc": starts.to(torch.int32).to(device),
            "extend_seq_lens_cpu": widths,
            "extend_prefix_lens_cpu": tuple(s.start for s in spans),
            "extend_num_tokens": sum(widths),
        }
    brings = bool(world.case.encoder) and mode.is_extend
    encoder_slots = None
    if world.case.encoder:
        lens_enc = tuple(world.case.encoder[s.request] for s in spans)
        fields["encoder_lens"] = torch.tensor(lens_enc, dtype=torch.int64, device=device)
        fields["encoder_lens_cpu"] = lens_enc
        fields["encoder_new_lens_cpu"] = lens_enc if brings else (0,) * len(spans)
        if brings:
            encoder_slots = torch.cat([*(world.placements[KVSpace.ENCODER].slots[s.request] for s in spans), none])
            fields["encoder_out_cache_loc"] = encoder_slots
    if verify:
        info = SpecInfo(widths[0], mask=mask, parents=None if parents is None else parents.to(device))
        if mask is not None:
            fill_mask(mask, seq_lens.to(device), trees)
        fields["spec_info"] = info
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=len(spans),
        req_pool_indices=rows,
        seq_lens=seq_lens.to(device),
        seq_lens_cpu=seq_lens,
        seq_lens_sum=sum(lens),
        max_seq_len=max(lens, default=0),
        positions=torch.cat([*positions, none]),
        out_cache_loc=out_cache_loc,
        kv_loc_plan=world.translator.plan(
            req_pool_indices=rows, out_cache_loc=out_cache_loc, encoder_out_cache_loc=encoder_slots
        ),
        **fields,
    )
    return Step(mode, spans, batch, tuple(trees), brings)


def tree_depths(parents: Tensor) -> Tensor:
    """Return the depth of each draft, [B, W] int64, from its parents; a root is at 0."""
    depth = torch.zeros_like(parents)
    for j in range(parents.shape[1]):
        up = parents[:, j]
        above = torch.gather(depth, 1, up.clamp_min(0)[:, None]).squeeze(1)
        depth[:, j] = torch.where(up < 0, torch.zeros_like(up), above + 1)
    return depth


def fill_mask(mask: VerifyMask, seq_lens: Tensor, trees: Sequence[Tensor]) -> None:
    """Write each request's cells in place, as drafting does; no other cell is touched."""
    starts = mask.indptr(seq_lens).tolist()
    for i, tree in enumerate(trees):
        cells = tree if mask.mode is TreeMaskMode.FULL_MASK else tree[:, tree.shape[1] - tree.shape[0] :]
        mask.buffer[starts[i] : starts[i + 1]] = cells.reshape(-1).to(mask.buffer.dtype)


def layer_inputs(world: World, step: Step, index: int, *, lse: bool = False) -> LayerInputs:
    """Return what the model passes to a layer in a step; padding rows come after the real ones.

    Args:
        world: Whose tensors.
        step: Which rows.
        index: The layer.
        lse: Ask for the LSE.
    """
    case, data = world.case, world.data[index]
    layer = case.layers[index]
    prefix = case.prefix
    q = torch.cat([data.q[s.request][s.start - prefix[s.request] : s.stop - prefix[s.request]] for s in step.spans])
    extra = step.batch.num_tokens - q.shape[0]
    q = _pad(q, extra)
    if layer.kind is Kind.MLA:
        return _mla_inputs(world, step, index, q, extra, lse)
    extras = AttentionExtras(return_lse=True) if lse else None
    if layer.cross:
        if not step.brings_encoder:
            return LayerInputs(q, None, None, extras)
        k = torch.cat([data.k[s.request] for s in step.spans])
        v = torch.cat([data.v[s.request] for s in step.spans])
        return LayerInputs(q, k, v, extras)
    k = torch.cat([data.k[s.request][s.start : s.stop] for s in step.spans])
    v = torch.cat([data.v[s.request][s.start : s.stop] for s in step.spans])
    return LayerInputs(q, _pad(k, extra), _pad(v, extra), extras)


def _mla_inputs(world: World, step: Step, index: int, q: Tensor, extra: int, lse: bool) -> LayerInputs:
    layer, data = world.case.layers[index], world.data[index]
    form = MlaForm(world.case.mla)
    new = _pad(torch.cat([data.latent[s.request][s.start : s.stop] for s in step.spans]), extra)
    latent, k_rope = new[:, : layer.latent].contiguous(), new[:, layer.latent :].contiguous()
    base = AttentionExtras(return_lse=lse, mla_form=form, latent=latent, k_rope=k_rope)
    if form is MlaForm.ABSORBED:
        nope, rope = q[..., : layer.latent].contiguous(), q[..., layer.latent :].contiguous()
        return LayerInputs(q, None, None, replace(base, q_nope=nope, q_rope=rope))
    if form is MlaForm.ONE_SHOT:
        k = _pad(torch.cat([data.k[s.request][s.start : s.stop] for s in step.spans]), extra)
        v = _pad(torch.cat([data.v[s.request][s.start : s.stop] for s in step.spans]), extra)
        return LayerInputs(q, k, v, base)
    lens = tuple(s.start for s in step.spans)
    indptr = torch.cumsum(torch.tensor((0, *lens)), 0).to(world.device)
    k = torch.cat([data.k[s.request][: s.start] for s in step.spans])
    v = torch.cat([data.v[s.request][: s.start] for s in step.spans])
    extras = AttentionExtras(return_lse=lse, mla_form=form, chunk_indptr=indptr, chunk_lens_cpu=lens)
    return LayerInputs(q, k, v, extras)


def _pad(rows: Tensor, count: int) -> Tensor:
    """Append rows of padding: finite, and unlike anything real."""
    if count == 0:
        return rows
    return torch.cat([rows, torch.full((count, *rows.shape[1:]), 0.25, dtype=rows.dtype, device=rows.device)])
