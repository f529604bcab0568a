"""Faults in what is written, where, and how it is read back: slots, spaces, scales, fp8, inputs that are not theirs."""

from __future__ import annotations

import torch

from attnplug.kv.write_loc import KVWriteLoc
from attnplug.modes import KVSpace

from ..testing.dense_backend import DenseBackend
from .fault import fault


def plain_write(backend, layer, loc, k, v):
    """Store rows without scale, as a fault would."""
    keys, values = backend.env.kv_pool.get_kv_buffer(layer.layer_id)
    keys[loc.slots], values[loc.slots] = k.to(keys.dtype), v.to(values.dtype)


@fault("writes slots that are not its own", "C:no_save:extend:*")
class WritesThoughToldNotTo(DenseBackend):
    def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True, extras=None):
        return super().forward_extend(q, k, v, layer, batch, True, extras)


@fault("stores wrong keys|keys were not stored", "A:causal:decode:*")
class WritesNothing(DenseBackend):
    def write(self, layer, batch, k, v):
        pass

    def with_new(self, layer, lane, keys, values, k, v, *, saved):
        return super().with_new(layer, lane, keys, values, k, v, saved=False)


@fault("stores wrong values|values were not stored", "A:causal:extend:*")
class WritesKeysForValues(DenseBackend):
    def write(self, layer, batch, k, v):
        super().write(layer, batch, k, k)

    def with_new(self, layer, lane, keys, values, k, v, *, saved):
        return super().with_new(layer, lane, keys, values, k, v, saved=False)


@fault("changed at slots \\[1\\].*not given to write", "C:padded:decode:*:pad=3")
class WritesPaddingToSlotOne(DenseBackend):
    def write(self, layer, batch, k, v):
        loc = KVWriteLoc.for_layer(batch, layer)
        pads = loc.slots == self.env.kv_pool.sink_slot
        moved = KVWriteLoc(torch.where(pads, torch.ones_like(loc.slots), loc.slots), loc.space)
        self.env.kv_pool.set_kv_buffer(layer, moved, k, v)


@fault("padding rows hold NaN", "C:padded:decode:*:pad=3")
class LeavesPaddingRowsUnwritten(DenseBackend):
    def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True, extras=None):
        got = super().forward_extend(q, k, v, layer, batch, save_kv_cache, extras)
        if batch.num_padding:
            got.out[-batch.num_padding :] = torch.empty_like(got.out[-batch.num_padding :])
        return got


@fault("NaN or infinity.*rows that nobody wrote", "A:causal:extend:*")
class LeavesTheLastRowUnwritten(DenseBackend):
    def forward_extend(self, *args, **kwargs):
        got = super().forward_extend(*args, **kwargs)
        out = torch.empty_like(got.out)
        out[:-1] = got.out[:-1]
        return got._replace(out=out)


@fault("stores wrong keys", "A:causal:decode:*")
class AccumulatesIntoThePool(DenseBackend):
    """Adds to what a slot held, as an index_add in place of an index_copy does."""

    def write(self, layer, batch, k, v):
        loc = KVWriteLoc.for_layer(batch, layer)
        for buffer, rows in zip(self.env.kv_pool.get_kv_buffer(layer.layer_id), (k, v)):
            buffer.index_add_(0, loc.slots, rows.to(buffer.dtype))


@fault("stores wrong keys", "A:causal:extend:*")
class WritesOneSlotLate(DenseBackend):
    def write(self, layer, batch, k, v):
        loc = KVWriteLoc.for_layer(batch, layer)
        super_slots = loc.slots.roll(1)
        self.env.kv_pool.set_kv_buffer(layer, KVWriteLoc(super_slots, loc.space), k, v)


@fault("space|reads table entries|unlisted pages|may not see", "F:spaces:decode:*")
class ReadsTheEncoderWithIdsOfTheFullSpace(DenseBackend):
    def slots(self, layer, batch, lane):
        table = self.kv_index_translator.read_source(batch.kv_loc_plan, KVSpace.FULL)
        return table.ids[table.row_ids[lane.index], : self.length(layer, batch, lane)].long()


@fault("the decoder's length for the encoder's", "A:cross:decode:*")
class CutsTheEncoderByTheDecodersLength(DenseBackend):
    def length(self, layer, batch, lane):
        return min(lane.length, super().length(layer, batch, lane))


@fault("k_scale forgotten", "H:fp8:decode:*,ks0.37,*")
class ForgetsTheKeyScaleOnRead(DenseBackend):
    def dequantised(self, buffer, at, scale):
        return super().dequantised(buffer, at, 1.0 if scale == self.k_scale else scale)

    def forward_extend(self, q, k, v, layer, *rest):
        self.k_scale = layer.k_scale
        return super().forward_extend(q, k, v, layer, *rest)


@fault("v_scale applied twice", "H:fp8:extend:*,ks0.37,*")
class ScalesValuesTwice(DenseBackend):
    def expand(self, x, layer):
        return super().expand(x, layer)

    def read(self, layer, batch, lane):
        keys, values = super().read(layer, batch, lane)
        return keys, values * layer.v_scale


@fault("scales swapped", "H:fp8:decode:*,ks0.37,*")
class SwapsTheScalesOnRead(DenseBackend):
    def read(self, layer, batch, lane):
        keys, values = super().read(layer, batch, lane)
        ratio = layer.v_scale / layer.k_scale
        return keys * ratio, values / ratio


@fault("stores keys without dividing by k_scale", "H:fp8:extend:*,ks0.37,*")
class StoresWithoutScale(DenseBackend):
    def write(self, layer, batch, k, v):
        plain_write(self, layer, KVWriteLoc.for_layer(batch, layer), k, v)


@fault("stores.*(NaN|nan|largest|saturat)", "H:saturate:extend:*")
class OverflowsInFp8(DenseBackend):
    def write(self, layer, batch, k, v):
        limit = torch.finfo(self.env.kv_dtype).max
        k, v = (x.masked_fill(x.abs() > limit, float("nan")) for x in (k / layer.k_scale, v / layer.v_scale))
        plain_write(self, layer, KVWriteLoc.for_layer(batch, layer), k, v)


@fault("wrote to batch.out_cache_loc", "A:causal:decode:*")
class WritesToTheBatch(DenseBackend):
    def write(self, layer, batch, k, v):
        super().write(layer, batch, k, v)
        batch.out_cache_loc.zero_()


@fault("wrote to batch.seq_lens", "A:causal:extend:*")
class AdvancesTheBatchsLengths(DenseBackend):
    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        batch.seq_lens.add_(1)


@fault("wrote to inputs.0.q", "A:causal:extend:*")
class ScalesTheCallersQueriesInPlace(DenseBackend):
    def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True, extras=None):
        got = super().forward_extend(q, k, v, layer, batch, save_kv_cache, extras)
        q.mul_(layer.scaling)
        return got


@fault("wrote to inputs.0.k", "H:fp8:decode:*,ks0.37,*")
class QuantisesTheCallersKeysInPlace(DenseBackend):
    def write(self, layer, batch, k, v):
        super().write(layer, batch, k, v)
        k.div_(layer.k_scale)


@fault("wrote to req_to_token", "A:causal:decode:*")
class ClampsTheTableInPlace(DenseBackend):
    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.env.req_to_token.clamp_(max=self.env.kv_pool.num_slots - 1)


@fault("changed at slots|were not stored|stores", "A:causal:extend:*")
class WritesWhenItPlans(DenseBackend):
    """Clears the slots of a step in every layer's buffer before any layer has run."""

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        for buffer in self.env.kv_pool.get_kv_buffer(0):
            buffer[batch.out_cache_loc] = 0


@fault("reads tables past the translator", "F:foreign_plan:decode:*")
class ReadsTheTablePastTheTranslator(DenseBackend):
    def slots(self, layer, batch, lane):
        return self.env.req_to_token[batch.req_pool_indices[lane.index], : self.length(layer, batch, lane)].long()


@fault("positions that the request may not see", "C:no_save:extend:*")
class ReadsOnlyThePoolWhenToldNotToWrite(DenseBackend):
    def with_new(self, layer, lane, keys, values, k, v, *, saved):
        return super().with_new(layer, lane, keys, values, k, v, saved=saved or lane.queries < keys.shape[0])


@fault("needs the host's encoder lengths, and does not refuse", "C:encoder_mirror:*")
class ReadsTheHostsEncoderLengths(DenseBackend):
    def length(self, layer, batch, lane):
        return batch.encoder_lens_cpu[lane.index] if layer.is_cross_attention else lane.length
