"""Faults in which keys a query sees: windows, causality, trees, lengths, pages."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnplug.modes import ForwardMode

from ..testing.dense_backend import DenseBackend
from .fault import fault


@fault("window off by one.*this shows 3\\b", "A:window_edge:decode:*,w3:*")
class ShortensTheWindowInDecode(DenseBackend):
    def window(self, q_pos, k_pos, size, *, causal):
        return super().window(q_pos, k_pos, size - (q_pos.shape[0] == 1), causal=causal)


@fault("window off by one.*this shows 5\\b", "A:window_edge:extend:*,w3:*")
class WidensTheWindowInExtend(DenseBackend):
    def window(self, q_pos, k_pos, size, *, causal):
        return super().window(q_pos, k_pos, size + (q_pos.shape[0] > 1), causal=causal)


@fault("window off by one.*this shows 5\\b", "A:window_edge:decode:*,w3:*")
class WidensTheWindowInDecode(DenseBackend):
    def window(self, q_pos, k_pos, size, *, causal):
        return super().window(q_pos, k_pos, size + (q_pos.shape[0] == 1), causal=causal)


@fault("window off by one.*this shows 15\\b", "A:window_edge:extend:*,w15:*")
class ShortensTheWindowInExtend(DenseBackend):
    def window(self, q_pos, k_pos, size, *, causal):
        return super().window(q_pos, k_pos, size - (q_pos.shape[0] > 1), causal=causal)


@fault("window ignored", "A:window_edge:extend:*,w15:*")
class ForgetsTheWindow(DenseBackend):
    def window(self, q_pos, k_pos, size, *, causal):
        return torch.ones_like(q_pos >= k_pos)


@fault("window is causal", "A:bidirectional:extend:*,w4,*")
class CutsTheRightOfABidirectionalWindow(DenseBackend):
    def window(self, q_pos, k_pos, size, *, causal):
        return super().window(q_pos, k_pos, size, causal=causal) & (causal | (k_pos <= q_pos))


@fault("top-left causal", "A:causal:extend:*")
class AlignsCausalityTopLeft(DenseBackend):
    def causal(self, index, row, length, queries):
        return index <= row


@fault("not causal", "A:causal:extend:*")
class ForgetsCausality(DenseBackend):
    def causal(self, index, row, length, queries):
        return torch.ones_like(index <= row)


@fault("does not see itself", "A:causal:extend:*")
class HidesAQuerysOwnKey(DenseBackend):
    def causal(self, index, row, length, queries):
        return index < length - queries + row


@fault("causal where it may not be", "A:block:*")
class RunsBlocksCausally(DenseBackend):
    def visible(self, layer, batch, lane, length):
        if batch.forward_mode is ForwardMode.DLLM_EXTEND:
            batch = batch.replace(forward_mode=ForwardMode.EXTEND)
        return super().visible(layer, batch, lane, length)


@fault("causal where it may not be", "A:encoder_only:*")
class RunsEncodersCausally(DenseBackend):
    def visible(self, layer, batch, lane, length):
        index = torch.arange(length)
        return (
            super().visible(layer, batch, lane, length)
            & (index[None] <= length - lane.queries + index[:, None])[: lane.queries]
        )


@fault("tree ignored", "C:mode:target_verify:*:mask=qlen*")
class IgnoresTheTree(DenseBackend):
    def tree(self, batch, lane, length):
        return self.causal(torch.arange(length)[None], torch.arange(lane.queries)[:, None], length, lane.queries)


@fault("tree transposed", "C:mode:target_verify:*:mask=qlen*")
class TransposesTheTree(DenseBackend):
    def tree(self, batch, lane, length):
        cells = super().tree(batch, lane, length)
        cells[:, -lane.queries :] = cells[:, -lane.queries :].T.clone()
        return cells


@fault("tree of another request", "C:sliced:target_verify:*:mask=*")
class ForgetsTheMaskRowOfASlice(DenseBackend):
    def tree(self, batch, lane, length):
        info = replace(batch.spec_info, mask_row=0, mask_seq_lens=None)
        return super().tree(batch.replace(spec_info=info), lane, length)


@fault("the mask's cells of cached positions ignored", "C:mode:target_verify:*:mask=full*")
class ShowsEveryCachedPosition(DenseBackend):
    def tree(self, batch, lane, length):
        cells = super().tree(batch, lane, length)
        cells[:, : length - lane.queries] = True
        return cells


@fault("tree of planning time", "C:tree_after_plan:*")
class ReadsTheTreeWhenItPlans(DenseBackend):
    """Copies the mask when metadata is made, and does not hear that drafting has filled it since."""

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        info = batch.spec_info
        self.kept = None if info is None or info.mask is None else info.mask.buffer.clone()

    def tree(self, batch, lane, length):
        info = batch.spec_info
        mask = replace(info.mask, buffer=self.kept)
        return super().tree(batch.replace(spec_info=replace(info, mask=mask)), lane, length)


@fault("window over a tree by place, not by position", "C:mode:target_verify:*,w9:*:mask=*", tries=4)
class MeasuresATreesWindowByPlace(DenseBackend):
    """Siblings share a position; this counts every draft as one further than the one before it."""

    def visible(self, layer, batch, lane, length):
        positions = batch.positions.clone()
        positions[lane.rows] = torch.arange(length - lane.queries, length)
        return super().visible(layer, batch.replace(positions=positions), lane, length)


@fault("reads table entries beyond a request's length", "A:causal:decode:*")
class ReadsOnePositionBeyondTheLength(DenseBackend):
    def length(self, layer, batch, lane):
        return super().length(layer, batch, lane) + 1


@fault("reads positions that the request may not see", "F:page_edge:decode:*:page=16")
class ReadsItsWholeLastPage(DenseBackend):
    """Rounds a length up to a page and masks nothing: a stale neighbour is visible."""

    def slots(self, layer, batch, lane):
        slots = super().slots(layer, batch, lane)
        page = self.env.page_size
        rest = -slots.numel() % page
        return torch.cat([slots, slots[-1:] + 1 + torch.arange(rest)])

    def causal(self, index, row, length, queries):
        return torch.ones_like(index <= row)


@fault("reads unlisted pages", "F:placed:decode:*")
class ReadsANeighbouringPage(DenseBackend):
    """Takes a request's pages for one run."""

    def slots(self, layer, batch, lane):
        slots = super().slots(layer, batch, lane)
        return (slots[0] + torch.arange(slots.numel())).clamp_max(self.env.kv_pool.num_slots - 1)


@fault("newest key missed", "A:causal:extend:*")
class MissesTheNewestKey(DenseBackend):
    def visible(self, layer, batch, lane, length):
        seen = super().visible(layer, batch, lane, length)
        seen[-1, -1] = False
        return seen


@fault("oldest key missed", "A:causal:decode:*")
class MissesTheOldestKey(DenseBackend):
    def visible(self, layer, batch, lane, length):
        seen = super().visible(layer, batch, lane, length)
        seen[:, 0] = False
        return seen


@fault("the first request's length for all", "F:placed:decode:*")
class UsesTheFirstLengthForAll(DenseBackend):
    def length(self, layer, batch, lane):
        return min(self.forward_metadata.lanes[0].length, lane.length)


@fault("new tokens ignored", "C:mode:target_verify:*")
class CountsSeqLensInVerify(DenseBackend):
    """Takes seq_lens, which leave the draft window out, for the lengths that are read."""

    def visible(self, layer, batch, lane, length):
        seen = super().visible(layer, batch, lane, length)
        if batch.forward_mode is ForwardMode.TARGET_VERIFY:
            seen[:, -lane.queries :] = False
        return seen


@fault("takes an upper bound for a length", "C:upper_bounds:*")
class TrustsAnUpperBound(DenseBackend):
    """Takes the host mirror for exact where the batch says that it is not."""

    def lengths(self, batch):
        return batch.kv_lens_cpu()


@fault("requests mixed up", "A:causal:decode:*")
class ReversesTheRequests(DenseBackend):
    def forward_extend(self, *args, **kwargs):
        got = super().forward_extend(*args, **kwargs)
        return got._replace(out=got.out.flip(0))


@fault("out is off by", "F:placed:extend:*place=swapped*")
class TakesTheEndsOfARunForARun(DenseBackend):
    """Reads a request as one run of slots where its first and its last say so."""

    def slots(self, layer, batch, lane):
        slots = super().slots(layer, batch, lane)
        run = slots[0] + torch.arange(slots.numel())
        return run if run[-1] == slots[-1] else slots


@fault("requests mixed up|rows that nobody wrote", "C:interleaved:decode:*")
class PutsGroupedRequestsBackInAnotherOrder(DenseBackend):
    """Computes requests in groups of like lengths and returns the groups one after the other."""

    def forward_extend(self, q, k, v, layer, batch, *rest):
        got = super().forward_extend(q, k, v, layer, batch, *rest)
        if batch.forward_mode is not ForwardMode.DECODE:
            return got
        order = sorted(range(batch.batch_size), key=lambda i: self.forward_metadata.lanes[i].length // 32)
        return got._replace(out=got.out[order])


@fault("rows that nobody wrote", "C:blind:*mask=full*")
class DividesByNothing(DenseBackend):
    """Normalises the weights of a query that sees no key."""

    def masked(self, scores, seen, layer):
        scores = super().masked(scores, seen, layer)
        return scores - scores.amax(dim=-1, keepdim=True)
