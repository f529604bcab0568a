"""Faults between q·k and the output: scaling, soft cap, sinks, LSE, groups, values."""

from __future__ import annotations

import math

import torch

from attnplug.attention_io import AttentionOutput

from ..testing.dense_backend import DenseBackend
from .fault import fault


@fault("soft cap after the mask", "A:soft_cap:extend:*")
class CapsAfterTheMask(DenseBackend):
    def masked(self, scores, seen, layer):
        return self.capped(scores.masked_fill(~seen[:, None, :], float("-inf")), layer)


@fault("soft cap ignored", "A:soft_cap:decode:*")
class ForgetsTheCap(DenseBackend):
    def capped(self, scores, layer):
        return scores


@fault("soft cap before the scaling", "A:soft_cap:extend:*")
class CapsBeforeScaling(DenseBackend):
    def scores(self, q, keys, layer):
        return super().scores(q, keys, layer) / layer.scaling

    def capped(self, scores, layer):
        return super().capped(scores, layer) * layer.scaling


@fault("softmax overflows", "A:scaling:decode:*sc8.0*")
class SubtractsNoMaximum(DenseBackend):
    def masked(self, scores, seen, layer):
        return super().masked(scores, seen, layer).exp().log()


@fault("scaling ignored", "A:scaling:extend:*")
class ForgetsTheScaling(DenseBackend):
    def scores(self, q, keys, layer):
        return super().scores(q, keys, layer) / layer.scaling


@fault("scaling of its own", "A:causal:decode:*")
class ScalesByHeadDim(DenseBackend):
    def scores(self, q, keys, layer):
        return super().scores(q, keys, layer) / layer.scaling / math.sqrt(layer.head_dim)


@fault("scaling applied twice", "A:scaling:decode:*")
class ScalesTwice(DenseBackend):
    def scores(self, q, keys, layer):
        return super().scores(q, keys, layer) * layer.scaling


@fault("sinks ignored", "A:sinks:extend:*")
class ForgetsSinks(DenseBackend):
    def close_with_sinks(self, rows, lse, sinks):
        return rows


@fault("sink added twice", "A:sinks:decode:*")
class AddsTheSinkTwice(DenseBackend):
    def close_with_sinks(self, rows, lse, sinks):
        return super().close_with_sinks(rows, lse, sinks + math.log(2.0))


@fault("sink applied twice", "A:sinks:extend:*")
class AppliesTheSinkTwice(DenseBackend):
    def close_with_sinks(self, rows, lse, sinks):
        return super().close_with_sinks(super().close_with_sinks(rows, lse, sinks), lse, sinks)


@fault("sinks of the wrong heads", "A:sinks:decode:*")
class ShiftsSinksByAHead(DenseBackend):
    def close_with_sinks(self, rows, lse, sinks):
        return super().close_with_sinks(rows, lse, sinks.roll(1))


@fault("sink is scaled", "A:sinks:extend:*")
class ScalesTheSink(DenseBackend):
    def close_with_sinks(self, rows, lse, sinks):
        return super().close_with_sinks(rows, lse, sinks * 1.25 / 8)


@fault("sinks in a state", "H:lse:*,s:*")
class LeavesSinksInAState(DenseBackend):
    state_leaves_sinks_out = False


@fault("sinks in the LSE", "H:lse:*,s:*")
class AddsSinksToTheLse(DenseBackend):
    def written_lse(self, lse, layer):
        return lse if layer.sinks is None else torch.logaddexp(lse, layer.sinks.expand_as(lse))


@fault("LSE in base 2", "H:lse:decode:*")
class WritesTheLseInBaseTwo(DenseBackend):
    def written_lse(self, lse, layer):
        return lse / math.log(2.0)


@fault("LSE of unscaled scores", "H:lse:decode:*")
class UnscalesTheLse(DenseBackend):
    def written_lse(self, lse, layer):
        return lse / layer.scaling


@fault("lse was asked for and is None", "H:lse:extend:*")
class ForgetsTheLse(DenseBackend):
    def forward_extend(self, *args, **kwargs):
        return AttentionOutput(super().forward_extend(*args, **kwargs).out)


@fault("lse was not asked for and was returned", "A:causal:extend:*")
class ReturnsAnLseUnasked(DenseBackend):
    def forward_extend(self, *args, **kwargs):
        out = super().forward_extend(*args, **kwargs).out
        return AttentionOutput(out, torch.zeros(out.shape[:2]))


@fault("wrong GQA grouping", "A:gqa:extend:*:4/2x64:*")
class InterleavesGroups(DenseBackend):
    def expand(self, x, layer):
        return x.repeat(1, layer.num_heads // layer.num_kv_heads, 1)


@fault("all heads are the first", "A:gqa:decode:*:4/2x64:*")
class ComputesTheFirstHeadForAll(DenseBackend):
    def scores(self, q, keys, layer):
        return super().scores(q[:, :1].expand_as(q), keys[:, :1].expand_as(keys), layer)

    def expand(self, x, layer):
        return super().expand(x[:, :1].expand_as(x), layer)


@fault("keys taken for values", "A:causal:extend:*")
class TakesKeysForValues(DenseBackend):
    def read(self, layer, batch, lane):
        keys, _ = super().read(layer, batch, lane)
        return keys, keys


@fault("some heads are wrong", "A:head_dim:decode:*")
class LosesTheLastHead(DenseBackend):
    def forward_extend(self, *args, **kwargs):
        got = super().forward_extend(*args, **kwargs)
        got.out[:, -1] = 0
        return got


@fault("wrong dtype or device.*out is torch.float32", "H:dtype:*:bfloat16:*")
class WidensTheOutput(DenseBackend):
    def forward_extend(self, *args, **kwargs):
        got = super().forward_extend(*args, **kwargs)
        return got._replace(out=got.out.float())


@fault("wrong shape", "A:v_head_dim:extend:*")
class PadsValuesToTheQueryWidth(DenseBackend):
    def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True, extras=None):
        got = super().forward_extend(q, k, v, layer, batch, save_kv_cache, extras)
        return got._replace(out=torch.nn.functional.pad(got.out, (0, layer.head_dim - layer.v_head_dim)))


@fault("out is off by", "H:dtype:decode:*:float32:*")
class RoundsToBfloat16(DenseBackend):
    """Right in its semantics and too coarse: the budget must be narrow enough to tell."""

    def scores(self, q, keys, layer):
        return super().scores(q.bfloat16().float(), keys.bfloat16().float(), layer)


@fault("depends on the batch.*DETERMINISTIC is declared", "H:batch_invariance:decode:*")
class SumsByTheBatch(DenseBackend):
    """Declares DETERMINISTIC; how many requests there are decides the order of a sum."""

    def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True, extras=None):
        got = super().forward_extend(q, k, v, layer, batch, save_kv_cache, extras)
        if batch.batch_size > 1:
            got = got._replace(out=torch.nextafter(got.out, torch.full_like(got.out, math.inf)))
        return got


@fault("new tokens counted twice", "C:mode:extend:*")
class CountsNewTokensTwice(DenseBackend):
    """Merges the state over prefix and new tokens with the state over the new tokens."""

    def masked(self, scores, seen, layer):
        scores = super().masked(scores, seen, layer)
        n = scores.shape[0]
        scores[..., -n:] += math.log(2.0)
        return scores


@fault("prefix counted twice", "C:mode:extend:*")
class CountsThePrefixTwice(DenseBackend):
    def masked(self, scores, seen, layer):
        scores = super().masked(scores, seen, layer)
        scores[..., : scores.shape[-1] - scores.shape[0]] += math.log(2.0)
        return scores


@fault("states do not merge|LSE", "H:merged_halves:*")
class GivesAnLseThatDoesNotMerge(DenseBackend):
    def written_lse(self, lse, layer):
        return lse + 0.5 * torch.arange(lse.shape[0])[:, None] + 0.25


@fault("prefix ignored", "C:mode:extend:*")
class ForgetsThePrefix(DenseBackend):
    def visible(self, layer, batch, lane, length):
        seen = super().visible(layer, batch, lane, length)
        seen[:, : length - lane.queries] = False
        return seen
