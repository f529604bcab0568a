"""Model families: what each layer of a transformers config asks of attention, and how third parties add theirs."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnplug.errors import UnsupportedModel
from attnplug.model_spec import LayerSpec

from .encoders import (
    encoder_decoder_layers,
    encoder_layers,
    scaled_encoder_decoder_layers,
    windowed_encoder_layers,
)
from .latent import latent_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES_GROUP = "attnplug_transformers.families.v1"
"""Entry points whose name is a config's ``model_type`` and whose value is a ``LayersOf``, or a ``Family``."""

LayersOf = Callable[["PretrainedConfig"], tuple[LayerSpec, ...]]
"""Reads a config's layers; raises UnsupportedModel where the config asks for what the family does not cover."""

FULL, SLIDING = "full_attention", "sliding_attention"
DECODER = "attnplug_transformers.adapters.decoder:DecoderAdapter"
LATENT = "attnplug_transformers.adapters.mla:MlaAdapter"
ENCODER_DECODER = "attnplug_transformers.adapters.encoder_decoder:EncoderDecoderAdapter"
WHISPER = "attnplug_transformers.adapters.encoder_decoder:WhisperAdapter"


@dataclass(frozen=True, slots=True)
class Family:
    """Architectures whose configs are read, and whose modules are served, alike."""

    name: str
    model_types: tuple[str, ...]
    layers: LayersOf
    adapter: str = DECODER
    """How their modules are served: ``module:attribute`` of an ``adapters.base.Adapter``, imported at its first use."""
    auto_class: str = "AutoModelForCausalLM"
    """The class of transformers that loads a checkpoint."""
    context: str = "max_position_embeddings"
    """The config's attribute with the most positions of a request; of an encoder-decoder, the decoder's."""
    encoder_context: str = ""
    """The config's attribute with the most rows of an encoder whose keys a decoder reads; empty where there is none."""


_REGISTRY: dict[str, Family] = {}


def register_family(family: Family, *, replace: bool = False) -> None:
    """Add a family; its model types become servable.

    Raises:
        ValueError: A model type is taken already and ``replace`` is not set.
    """
    taken = [t for t in family.model_types if t in _REGISTRY]
    if taken and not replace:
        owners = ", ".join(f"{t} ({_REGISTRY[t].name})" for t in taken)
        raise ValueError(f"family {family.name!r} names model types that are taken: {owners}; or pass replace=True")
    _REGISTRY.update({model_type: family for model_type in family.model_types})


def known_model_types() -> tuple[str, ...]:
    """Return every model type with a family: built in, registered, or announced by an installed distribution."""
    return tuple(sorted({*_REGISTRY, *(point.name for point in _announced())}))


def families() -> tuple[Family, ...]:
    """Return the families that are built in or registered, each once."""
    return tuple(dict.fromkeys(_REGISTRY.values()))


def find_family(model_type: str) -> Family | None:
    """Return the family of a model type, loading an announced one at its first use; None where there is none.

    Raises:
        UnsupportedModel: The distribution that announces it fails to import, or several announce it.
    """
    if model_type in _REGISTRY:
        return _REGISTRY[model_type]
    points = [point for point in _announced() if point.name == model_type]
    if not points:
        return None
    if len(points) > 1:
        raise UnsupportedModel(
            f"model type {model_type!r} is announced by {', '.join(_owner(p) for p in points)}",
            remedy="uninstall all but one of them",
        )
    try:
        loaded = points[0].load()
    # Foreign code: whatever it raises is raised again with the distribution's name on it.
    except Exception as error:
        raise UnsupportedModel(
            f"model family {model_type!r} of {_owner(points[0])} failed to load: {type(error).__name__}: {error}",
            remedy="repair, reinstall or uninstall that distribution",
        ) from error
    if isinstance(loaded, Family):
        family = dataclasses.replace(loaded, model_types=(model_type,))
    else:
        family = Family(f"{model_type} of {_owner(points[0])}", (model_type,), loaded)
    register_family(family)
    return family


def _announced() -> Iterator[importlib.metadata.EntryPoint]:
    yield from importlib.metadata.entry_points(group=FAMILIES_GROUP)


def _owner(point: importlib.metadata.EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


# Reading configs


def layer_configs(config: PretrainedConfig) -> list[Any]:
    """Return one config a layer: the same one, or each layer's own where head counts differ by layer."""
    count = int(config.num_hidden_layers)
    if getattr(config, "is_heterogeneous", False):
        return [config.per_layer_config[i] for i in range(count)]
    return [config] * count


def layer_windows(config: PretrainedConfig, *, uniform: bool) -> list[int]:
    """Return each layer's ``sliding_window_size``: a config's window W is W-1, and -1 means none.

    Args:
        config: Its ``layer_types`` decide where it has them.
        uniform: Whether, without ``layer_types``, ``sliding_window`` counts for every layer.

    Raises:
        UnsupportedModel: A layer type that is neither full nor sliding attention, or a window without a key.
    """
    windows = []
    for index, one in enumerate(layer_configs(config)):
        types = getattr(one, "layer_types", None)
        kind = types[index] if types else (SLIDING if uniform else FULL)
        if kind not in (FULL, SLIDING):
            raise UnsupportedModel(
                f"{config.model_type}: layer {index} is {kind!r}; allowed: {FULL!r}, {SLIDING!r}",
                remedy="add a family for it: see docs/models.md",
            )
        window = getattr(one, "sliding_window", None) if kind == SLIDING else None
        if window is not None and int(window) < 1:  # 0 would see no key at all, and is not how a config says "none".
            raise UnsupportedModel(
                f"{config.model_type}: sliding_window of layer {index} is {window}; allowed: at least 1, or null",
                remedy="set it to null in config.json where every key is seen",
            )
        windows.append(-1 if window is None else int(window) - 1)
    return windows


def decoder_layers(
    config: PretrainedConfig,
    *,
    scaling: Callable[[Any, int], float] = lambda _config, head_dim: head_dim**-0.5,
    uniform_window: bool = False,
    softcap: str = "",
    sinks: bool = False,
) -> tuple[LayerSpec, ...]:
    """Return the layers of a decoder with grouped softmax attention; most families are this with other arguments.

    Args:
        config: The text config.
        scaling: The factor on q·k, of the layer's config and head dimension.
        uniform_window: ``sliding_window`` counts for every layer where there are no ``layer_types``.
        softcap: The config's attribute that holds the soft cap.
        sinks: Each layer has a sink a query head.
    """
    windows = layer_windows(config, uniform=uniform_window)
    layers = []
    for index, (one, window) in enumerate(zip(layer_configs(config), windows, strict=True)):
        heads = int(one.num_attention_heads)
        head_dim = int(getattr(one, "head_dim", None) or one.hidden_size // heads)
        layers.append(
            LayerSpec(
                layer_id=index,
                num_heads=heads,
                num_kv_heads=int(getattr(one, "num_key_value_heads", None) or heads),
                head_dim=head_dim,
                v_head_dim=head_dim,
                scaling=float(scaling(one, head_dim)),
                sliding_window_size=window,
                logit_cap=float(getattr(one, softcap, None) or 0.0) if softcap else 0.0,
                has_sinks=sinks,
            )
        )
    return tuple(layers)


def _gemma(config: PretrainedConfig) -> tuple[LayerSpec, ...]:
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModel(
            f"{config.model_type}: use_bidirectional_attention is set; allowed: causal attention",
            remedy="it is an embedding model and generates no text",
        )
    return decoder_layers(
        config, scaling=lambda c, _dim: c.query_pre_attn_scalar**-0.5, softcap="attn_logit_softcapping"
    )


def _granite(config: PretrainedConfig) -> tuple[LayerSpec, ...]:
    return decoder_layers(config, scaling=lambda c, _dim: c.attention_multiplier)


def _granite_sinks(config: PretrainedConfig) -> tuple[LayerSpec, ...]:
    return decoder_layers(config, scaling=lambda c, _dim: c.attention_multiplier, sinks=True)


def _uniform_window(config: PretrainedConfig) -> tuple[LayerSpec, ...]:
    return decoder_layers(config, uniform_window=True)


def _gpt_oss(config: PretrainedConfig) -> tuple[LayerSpec, ...]:
    return decoder_layers(config, sinks=True)


_FULL_ATTENTION = (
    *("llama", "arcee", "cohere", "ernie4_5", "exaone", "gemma", "glm", "glm4", "helium"),
    *("olmo", "olmo2", "olmoe", "qwen3_moe", "seed_oss"),
)
_LATENT = ("deepseek_v2", "deepseek_v3", "axk1", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu")
_WINDOW_BY_LAYER = ("cohere2", "ministral", "olmo3", "qwen2", "qwen3", "smollm3")

for _family in (
    Family("full attention", _FULL_ATTENTION, decoder_layers),
    Family("window by layer type", _WINDOW_BY_LAYER, decoder_layers),
    Family("one window for all layers", ("mistral", "mixtral", "phi3", "starcoder2"), _uniform_window),
    Family("gemma with soft cap", ("gemma2", "gemma3_text", "vaultgemma"), _gemma),
    Family("granite", ("granite", "granitemoe", "granitemoeshared"), _granite),
    Family("granite with window and sinks", ("granite_swa", "granitemoe_swa"), _granite_sinks),
    Family("gpt-oss", ("gpt_oss",), _gpt_oss),
    Family("latent attention", _LATENT, latent_layers, adapter=LATENT),
    Family(
        "encoder-decoder",
        ("bart", "mbart"),
        encoder_decoder_layers,
        adapter=ENCODER_DECODER,
        auto_class="AutoModelForSeq2SeqLM",
        encoder_context="max_position_embeddings",
    ),
    Family(
        "speech encoder-decoder",
        ("whisper",),
        scaled_encoder_decoder_layers,
        adapter=WHISPER,
        auto_class="AutoModelForSpeechSeq2Seq",
        context="max_target_positions",
        encoder_context="max_source_positions",
    ),
    Family("encoder", ("bert",), encoder_layers, auto_class="AutoModel"),
    Family("encoder with local windows", ("modernbert",), windowed_encoder_layers, auto_class="AutoModel"),
):
    register_family(_family)
