"""Faults in what a backend declares and what it refuses: promises too many; refusals too few, late, unreasoned."""

from __future__ import annotations

from attnplug.errors import BackendRejected, Reason
from attnplug.modes import ForwardMode
from attnplug.spec import Dims, Feature

from ..testing.dense_backend import DENSE, DenseBackend
from .fault import fault


def without(*features: Feature):
    return DENSE.replace(features=DENSE.features - set(features))


@fault("refuses what it declares", "A:sinks:decode:*")
class DeclaresWhatItRefuses(DenseBackend):
    def forward_extend(self, q, k, v, layer, *rest):
        if layer.sinks is not None:
            raise BackendRejected("no sinks", reasons={"dense": [Reason("sinks", "sinks", "none")]})
        return super().forward_extend(q, k, v, layer, *rest)


class Admits(DenseBackend):
    """Refuses nothing: no environment, no batch, no layer, no extras."""

    def __init__(self, env, spec):
        super().__init__(env, DENSE)
        self.spec = spec

    def check_batch(self, batch):
        pass

    def forward(self, q, k, v, layer, batch, save_kv_cache=True, extras=None):
        if batch.forward_mode is ForwardMode.IDLE:
            return self._idle(q, v, layer, extras)
        return self.forward_extend(q, k, v, layer, batch, save_kv_cache, extras)


@fault("serves what it does not declare", "J:undeclared:decode:*features.sinks", spec=without(Feature.SINKS))
class ServesWhatItDoesNotDeclare(Admits):
    pass


@fault("serves what it does not declare", "J:undeclared:extend:*features.softcap", spec=without(Feature.SOFTCAP))
class IgnoresWhatItDoesNotDeclare(Admits):
    def capped(self, scores, layer):
        return scores


@fault("serves what it does not declare", "J:undeclared:extend:*features.lse", spec=without(Feature.LSE))
class GivesAnLseThatItDoesNotDeclare(Admits):
    pass


@fault("serves what it does not declare", "J:undeclared:*page_sizes.16", spec=DENSE.replace(page_sizes=Dims((1, 64))))
class TakesAnyPageSize(Admits):
    pass


@fault("serves what it does not declare", "J:bad_batch:decode:*batch_size")
class TakesAnyBatchSize(Admits):
    pass


@fault(
    "serves what it does not declare",
    "J:undeclared:*modes.draft_extend",
    spec=DENSE.replace(modes=DENSE.modes - {ForwardMode.DRAFT_EXTEND}),
)
class ServesAModeThatItDoesNotDeclare(Admits):
    pass


@fault("fails instead of refusing", "J:undeclared:extend:*features.sinks", spec=without(Feature.SINKS))
class FailsInsteadOfRefusing(Admits):
    def forward_extend(self, q, k, v, layer, *rest):
        if layer.sinks is not None:
            raise NotImplementedError("sinks")
        return super().forward_extend(q, k, v, layer, *rest)


@fault(
    "refuses after writing|were written before the refusal",
    "J:undeclared:*features.softcap",
    spec=without(Feature.SOFTCAP),
)
class RefusesAfterWriting(Admits):
    def forward_extend(self, q, k, v, layer, batch, *rest):
        self.write(layer, batch, k, v)
        raise BackendRejected("no cap", reasons={"dense": [Reason("softcap", str(layer.logit_cap), "none")]})


@fault(
    "no reason|without field, asked and supported", "J:undeclared:extend:*features.sinks", spec=without(Feature.SINKS)
)
class RefusesWithoutReasons(Admits):
    def forward_extend(self, q, k, v, layer, batch, *rest):
        if layer.sinks is not None:
            raise BackendRejected("cannot", reasons={})
        return super().forward_extend(q, k, v, layer, batch, *rest)
