"""Where a layer writes this step's keys and values: slots, and the space they are ids of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ..errors import ContractViolation
from ..modes import KVSpace

if TYPE_CHECKING:
    from ..batch import ForwardBatch
    from ..layer import AttentionLayer


@dataclass(frozen=True, slots=True)
class KVWriteLoc:
    """Physical slots with their space; a pool refuses slots of another space."""

    slots: Tensor
    """[T] int64, device."""
    space: KVSpace

    @classmethod
    def for_layer(cls, batch: ForwardBatch, layer: AttentionLayer) -> KVWriteLoc:
        """Pick the slots of the layer's own space: a token may have one in each, and a layer writes once, to its own.

        Raises:
            ContractViolation: The batch has no plan, or its plan has no slots for the layer's space.
        """
        plan = batch.kv_loc_plan
        if plan is None:
            raise ContractViolation(
                "the batch has no kv_loc_plan, so no slot is translated",
                remedy="make it with KVIndexTranslator.plan(...) before the forward",
            )
        space = KVSpace.ENCODER if layer.is_cross_attention else plan.space_of(layer.layer_id)
        slots = plan.write_slots.get(space)
        if slots is None:
            raise ContractViolation(
                f"layer {layer.layer_id} writes to the {space.value} space, but the plan has slots only for "
                f"{', '.join(s.value for s in plan.write_slots) or 'no space'}",
                remedy="give the translator the write slots of that space, or call with save_kv_cache=False",
            )
        return cls(slots, space)
