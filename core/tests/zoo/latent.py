"""Faults of MLA, as variations of torch_native: rope parts, scales, forms."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attnplug_torch_native.backend import TorchNativeBackend
from attnplug_torch_native.spec import SPEC

from .fault import fault


def native(env, spec):
    return TorchNativeBackend(env)


class Native(TorchNativeBackend):
    """torch_native, made as the zoo makes its backends; a fault changes what a call is given, or gives."""

    def __init__(self, env, spec):
        super().__init__(env)

    def forward(self, q, k, v, layer, batch, save_kv_cache=True, extras=None):
        kept = layer.scaling
        layer.scaling = self.scaling(layer)
        try:
            got = super().forward(q, k, v, layer, self.changed_batch(batch), save_kv_cache, self.changed(extras))
        finally:
            layer.scaling = kept
        return self.given(got, extras)

    def scaling(self, layer):
        return layer.scaling

    def changed(self, extras):
        return extras

    def changed_batch(self, batch):
        return batch

    def given(self, got, extras):
        return got


def of_native(says, where, **options):
    return fault(says, where, spec=SPEC, right=native, **options)


@of_native("rope part forgotten", "A:mla:decode:*mla=absorbed")
class ForgetsTheRopePartOfQueries(Native):
    def changed(self, extras):
        return replace(extras, q_rope=torch.zeros_like(extras.q_rope))


@of_native("latent part forgotten", "A:mla:extend:*mla=absorbed")
class ScoresByTheRopePartAlone(Native):
    def changed(self, extras):
        return replace(extras, q_nope=torch.zeros_like(extras.q_nope))


@of_native("scaling of its own", "A:mla:decode:*mla=absorbed")
class ScalesByTheLatentWidth(Native):
    """Uses 1/√(C + R), the width that it multiplies over, instead of the model's scaling."""

    def scaling(self, layer):
        return (layer.kv_lora_rank + layer.qk_rope_head_dim) ** -0.5


@of_native("stores wrong keys", "A:mla:decode:*mla=absorbed")
class StoresNoRope(Native):
    def changed(self, extras):
        return replace(extras, k_rope=torch.zeros_like(extras.k_rope))


@of_native("wrong shape", "A:mla:decode:*mla=absorbed")
class GivesTheExpandedWidth(Native):
    def given(self, got, extras):
        return got._replace(out=got.out[..., :128].contiguous())


@of_native("LSE in base 2", "A:mla:*mla=chunked_prefix:*")
class WritesAChunksLseInBaseTwo(Native):
    def given(self, got, extras):
        return got if got.lse is None else got._replace(lse=got.lse / math.log(2.0))


@of_native("k_scale forgotten", "H:fp8:decode:*mla=absorbed*")
class ForgetsTheScaleOfLatentRows(Native):
    """Keys are read as stored; values, which are the same rows, with their scale."""

    def scaling(self, layer):
        return layer.scaling / layer.k_scale


@of_native("stores wrong keys|writes slots", "C:no_save:*mla=absorbed*")
class StoresLatentRowsThoughToldNotTo(Native):
    def forward(self, q, k, v, layer, batch, save_kv_cache=True, extras=None):
        return super().forward(q, k, v, layer, batch, True, extras)
