"""Multi-head latent attention (MLA) as layers: what a config of DeepSeek's kind asks, told without its modules."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attnplug.errors import UnsupportedModel
from attnplug.model_spec import LayerSpec
from attnplug.spec import Kind

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["latent_layers"]

_WIDTHS = (
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
_INDEXERS = ("index_topk", "sparse_attention_config", "attention_chunk_size", "sliding_window")


def latent_layers(config: PretrainedConfig) -> tuple[LayerSpec, ...]:
    """Return the layers of a decoder whose every layer is MLA; heads are counted expanded, so Hk is Hq.

    The scaling is that of the modules: (nope + rope)^-½, and under YaRN with ``mscale_all_dim`` the square of its
    magnitude (DeepSeek-V2, arXiv 2405.04434; YaRN, arXiv 2309.00071) once for queries and once for keys.

    Raises:
        UnsupportedModel: A width is missing, or the config asks for attention that sees fewer keys.
    """
    faults = [
        f"{name} is {getattr(config, name, None)!r}; allowed: a positive number"
        for name in _WIDTHS
        if not isinstance(getattr(config, name, None), int) or getattr(config, name) < 1
    ]
    heads, groups = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if groups not in (None, heads):
        faults.append(f"num_key_value_heads is {groups}; allowed: num_attention_heads, {heads}: no groups")
    faults += [f"it sets {name}; allowed: full attention" for name in _INDEXERS if getattr(config, name, None)]
    if faults:
        raise UnsupportedModel(
            f"the latent attention of {config.model_type} cannot be served: " + "; ".join(faults),
            remedy="correct config.json, or add a family and an adapter for it (see docs/models.md)",
        )
    read: Any = config
    head_dim = read.qk_nope_head_dim + read.qk_rope_head_dim
    scaling = head_dim**-0.5 * _magnitude(getattr(config, "rope_parameters", None) or {}) ** 2
    return tuple(
        LayerSpec(
            layer_id=index,
            kind=Kind.MLA,
            num_heads=read.num_attention_heads,
            num_kv_heads=read.num_attention_heads,
            head_dim=head_dim,
            v_head_dim=read.v_head_dim,
            scaling=scaling,
            kv_lora_rank=read.kv_lora_rank,
            qk_rope_head_dim=read.qk_rope_head_dim,
        )
        for index in range(_count(read))
    )


def _count(config: Any) -> int:
    """Return how many attention layers there are: LongCat's blocks have two, whatever older configs call hidden layers.

    Args:
        config: 5.24 derives ``num_hidden_layers`` from ``num_layers``; 5.17 leaves it at its default.
    """
    return 2 * int(config.num_layers) if config.model_type == "longcat_flash" else int(config.num_hidden_layers)


def _magnitude(rope: dict[str, Any]) -> float:
    """Return YaRN's attention magnitude for all dimensions; 1 where rope is not scaled or the config names none."""
    mscale, factor = float(rope.get("mscale_all_dim") or 0.0), float(rope.get("factor") or 1.0)
    if rope.get("rope_type", "default") == "default" or not mscale or factor <= 1.0:
        return 1.0
    return 0.1 * mscale * math.log(factor) + 1.0
