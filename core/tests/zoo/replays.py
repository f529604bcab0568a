"""Faults that only a graph shows, as variations of torch_native."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnplug.modes import SharedReadEnds

from .latent import Native, of_native


@of_native("synchronises or depends on data in the graph", "D:replay:decode:*")
class SynchronisesInTheGraph(Native):
    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        if batch.uses_graph_buffers and int(batch.seq_lens.sum().item()) < 0:
            raise AssertionError


@of_native("replay differs from eager", "D:replay:decode:*")
class BakesTheFirstStepIn(Native):
    """Plans a size's first step, and never again: a replay reads the slots of the capture."""

    def __init__(self, env, spec):
        super().__init__(env, spec)
        self.planned = {}

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        if not batch.uses_graph_buffers or batch.batch_size not in self.planned:
            super().init_forward_metadata_out_graph(batch, in_capture)
            self.planned[batch.batch_size] = self.forward_metadata
        self.forward_metadata = self.planned[batch.batch_size]


@of_native("replay differs from eager", "D:replay:decode:*")
class AllocatesMetadataEachReplay(Native):
    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch.replace(uses_graph_buffers=False), in_capture)


@of_native("replay differs from eager|metadata not refreshed", "D:tree:target_verify:*")
class KeepsTheMaskOfTheCapture(Native):
    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        info = batch.spec_info
        if batch.uses_graph_buffers and info is not None and info.mask is not None:
            if in_capture:
                self.cells = info.mask.buffer.clone()
            batch = batch.replace(spec_info=replace(info, mask=replace(info.mask, buffer=self.cells)))
        super().init_forward_metadata_out_graph(batch, in_capture)


@of_native("reads shared tensors after PRE_REPLAY", "E:graph_read_end:decode:*")
class ReadsTheTableInTheReplay(Native):
    """Plans inside the forward what it says to have read before."""

    def forward(self, q, k, v, layer, batch, save_kv_cache=True, extras=None):
        self.init_forward_metadata_out_graph(batch)
        return super().forward(q, k, v, layer, batch, save_kv_cache, extras)

    def shared_read_ends(self, mode):
        return SharedReadEnds.PRE_REPLAY


@of_native("stale write slots at capture", "D:replay:decode:*")
class WritesPaddingToAFixedSlot(Native):
    """Moves rows that would write the sink to slot 1, as if the sink were a pool's first page."""

    def forward(self, q, k, v, layer, batch, save_kv_cache=True, extras=None):
        plan = batch.kv_loc_plan
        for slots in plan.write_slots.values():
            keys, _ = self.env.kv_pool.get_kv_buffer(layer.layer_id)
            keys[torch.where(slots == 0, 1, slots)] = k.to(keys.dtype)
        return super().forward(q, k, v, layer, batch, save_kv_cache, extras)
