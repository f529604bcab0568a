"""Faults in what a backend keeps and shares: plans for several layers, steps and instances, idle rows, who serves."""

from __future__ import annotations

import torch

from attnplug.attention_io import AttentionOutput
from attnplug.modes import SharedReadEnds

from ..testing.dense_backend import DENSE, DenseBackend
from .fault import fault


@fault("reads positions that the request may not see", "B:neighbours:extend:*arg=window")
class PlansTheFirstLayersWindowForAll(DenseBackend):
    def window_of(self, layer):
        return self.env.model_spec.layers[0].sliding_window_size

    def visible(self, layer, batch, lane, length):
        own, layer.sliding_window_size = layer.sliding_window_size, self.window_of(layer)
        try:
            return super().visible(layer, batch, lane, length)
        finally:
            layer.sliding_window_size = own


@fault("computed as another layer|soft cap ignored", "B:neighbours:decode:*arg=cap")
class PlansTheFirstLayersCapForAll(DenseBackend):
    def capped(self, scores, layer):
        cap = self.env.model_spec.layers[0].logit_cap
        return cap * torch.tanh(scores / cap) if cap else scores


@fault("some heads are wrong|out is all zeros|heads of another layer", "K:shapes:*")
class PlansTheFirstLayersHeadsForAll(DenseBackend):
    """Computes as many heads as the first layer has; the rest stay zero."""

    def forward_extend(self, q, k, v, layer, *rest):
        got = super().forward_extend(q, k, v, layer, *rest)
        got.out[:, self.env.model_spec.layers[0].num_heads :] = 0
        return got


@fault("computed as another layer|k_scale|scale", "B:neighbours:extend:*arg=scales")
class TakesTheFirstLayersScalesForAll(DenseBackend):
    def read(self, layer, batch, lane):
        keys, values = super().read(layer, batch, lane)
        return keys / layer.k_scale, values / layer.v_scale


@fault("idle rows are not zeros", "C:idle:*:pad=3")
class LeavesIdleRowsUninitialised(DenseBackend):
    def _idle(self, q, v, layer, extras):
        return AttentionOutput(torch.empty(q.shape[0], layer.num_heads, layer.v_head_dim))


@fault("idle lse must be", "C:idle:*lse=1*")
class GivesAnIdleLseOfZero(DenseBackend):
    def _idle(self, q, v, layer, extras):
        got = super()._idle(q, v, layer, extras)
        return got if got.lse is None else got._replace(lse=torch.zeros_like(got.lse))


@fault("writes slots|touch|changed at slots", "C:idle:*:pad=3")
class WritesInAnIdleStep(DenseBackend):
    def _idle(self, q, v, layer, extras):
        keys, _ = self.env.kv_pool.get_kv_buffer(layer.layer_id)
        keys[:1] = 0
        return super()._idle(q, v, layer, extras)


@fault("lse must be −inf exactly where no key is visible", "C:no_encoder:*lse=1*")
class GivesEmptyRowsAFiniteLse(DenseBackend):
    def written_lse(self, lse, layer):
        return lse.clamp_min(-1e4)


@fault("output is all zeros", "A:soft_cap:extend:*")
class SwallowsAnException(DenseBackend):
    def capped(self, scores, layer):
        if layer.logit_cap:
            raise FloatingPointError("no cap")
        return scores

    def forward_extend(self, q, k, v, layer, batch, *rest):
        try:
            return super().forward_extend(q, k, v, layer, batch, *rest)
        except FloatingPointError:
            return AttentionOutput(torch.zeros(q.shape[0], layer.num_heads, layer.v_head_dim))


@fault("raises FloatingPointError.*no cap", "A:soft_cap:extend:*")
class RaisesInTheMiddle(DenseBackend):
    def capped(self, scores, layer):
        if layer.logit_cap:
            raise FloatingPointError("no cap")
        return scores


class Stranger(DenseBackend):
    def __init__(self, env, spec):
        super().__init__(env, spec.replace(name="stranger"))


@fault("another backend serves", "A:causal:extend:*")
class IsAnotherBackend(Stranger):
    pass


@fault("another backend serves", "A:causal:decode:*")
class ForwardsToAnotherBackend(DenseBackend):
    """Looks like itself and lets another object run every layer."""

    def __init__(self, env, spec):
        super().__init__(env, spec)
        self.other = Stranger(env, spec)

    def unwrap(self, layer_id, mode):
        return self.other


@fault("two parts of planning give another result|before|no metadata", "L:entries_agree:extend:*")
class PlansInTheEagerEntryOnly(DenseBackend):
    """The eager entry adds what the two parts do not: a step of the second kind reads the first kind's plan."""

    eager = False

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        self.eager = True

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.eager = False

    def masked(self, scores, seen, layer):
        return super().masked(scores, seen if self.eager else seen & (seen.cumsum(-1) > 1), layer)


@fault("forward_decode gives another result than forward", "L:dispatch:decode:*")
class DispatchesPastItsOwnDecode(DenseBackend):
    def forward(self, q, k, v, layer, batch, save_kv_cache=True, extras=None):
        return self.forward_extend(q, k, v, layer, batch, save_kv_cache, extras)

    def forward_decode(self, *args, **kwargs):
        got = self.forward_extend(*args, **kwargs)
        return got._replace(out=got.out * 1.5)


@fault("state from another step|NaN|wrong shape|raise", "L:replanned:decode:*")
class KeepsTheFirstPlan(DenseBackend):
    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        if self.forward_metadata is None:
            super().init_forward_metadata_out_graph(batch, in_capture)


@fault("rows that nobody wrote", "L:snapshot_restores:decode:*")
class ConsumesItsMetadata(DenseBackend):
    """Each layer takes a lane out of the plan that all layers share."""

    def forward_extend(self, *args, **kwargs):
        got = super().forward_extend(*args, **kwargs)
        plan = self.forward_metadata
        self.forward_metadata = type(plan)(plan.batch, plan.lanes[1:])
        return got


class Shared:
    plan = None


@fault("instances share state.*right alone", "L:instances:decode:*")
class SharesItsPlanWithEveryInstance(DenseBackend):
    @property
    def forward_metadata(self):
        return Shared.plan

    @forward_metadata.setter
    def forward_metadata(self, value):
        Shared.plan = value

    def slots(self, layer, batch, lane):
        return super().slots(layer, self.forward_metadata.batch, lane)


@fault("reads shared tensors after PRE_REPLAY", "E:eager_read_end:decode:*")
class SaysThatItsReadsEndEarly(DenseBackend):
    def shared_read_ends(self, mode):
        return SharedReadEnds.PRE_REPLAY


@fault("overrides with another signature|does not take", "L:members:*")
class NarrowsASignature(DenseBackend):
    def init_forward_metadata_out_graph(self, batch):
        super().init_forward_metadata_out_graph(batch)


@fault("declares what it is not|legal length", "L:answers:*")
class FillsGraphsWithLengthZero(DenseBackend):
    def get_cuda_graph_seq_len_fill_value(self):
        return 0


@fault("declares what it is not|needs_cpu_seq_lens", "L:answers:*", spec=DENSE.replace(needs_cpu_seq_lens=False))
class ReadsAMirrorThatItDoesNotDeclare(DenseBackend):
    def __init__(self, env, spec):
        super().__init__(env, spec)
        self.needs_cpu_seq_lens = True


@fault("kv_index_translator is not the environment's|another translator", "L:answers:*")
class ReadsThroughATranslatorOfItsOwn(DenseBackend):
    def __init__(self, env, spec):
        super().__init__(env, spec)
        self.kv_index_translator = type(env.translator)(env.kv_pool, env.req_to_token)


@fault("wrong result|must be an AttentionOutput", "A:causal:extend:*")
class ReturnsABareTensor(DenseBackend):
    def forward_extend(self, *args, **kwargs):
        return super().forward_extend(*args, **kwargs).out


@fault("reads the host's lengths, undeclared", "C:no_mirror:decode:*", spec=DENSE.replace(needs_cpu_seq_lens=False))
class ReadsHostLengthsUndeclared(DenseBackend):
    def lengths(self, batch):
        return batch.seq_lens_cpu.tolist()
