"""A transformers config as a ModelSpec: what the model asks of attention, known before weights load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnplug.errors import UnsupportedModel
from attnplug.model_spec import LayerSpec, ModelSpec

from .families import FULL, SLIDING, Family, decoder_layers, families, find_family, known_model_types, layer_configs

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "encoder_len_of",
    "model_spec_from_config",
    "model_spec_from_path",
    "refuse_decoder",
    "refuse_encoder",
    "refuse_headless",
]

_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
_STRANGE = (
    "attention_chunk_size",
    "index_topk",
    "kv_lora_rank",
    "num_kv_shared_layers",
    "sparse_attention_config",
    "use_bidirectional_attention",
    "v_head_dim",
)
"""Attributes that change which keys are seen or how, and that the generic reading would pass over."""


def model_spec_from_config(config: PretrainedConfig, *, dtype: str) -> ModelSpec:
    """Return what a model asks of attention, layer by layer.

    Args:
        config: A config of a causal language model, an encoder-decoder or an encoder.
        dtype: torch's name of the activations' dtype, such as ``"bfloat16"``.

    Raises:
        UnsupportedModel: No family reads this architecture, or the checkpoint is quantised or multimodal; names what
            exists and how to add to it.
    """
    family = find_family(config.model_type)
    _refuse_unservable(config, family)
    layers = _generic_layers(config) if family is None else tuple(family.layers(config))
    return ModelSpec(
        name=getattr(config, "name_or_path", "") or config.model_type,
        layers=layers,
        dtype=dtype,
        max_context_len=_context_len(config, "max_position_embeddings" if family is None else family.context),
    )


def encoder_len_of(config: PretrainedConfig) -> int:
    """Return the most rows that a decoder reads of an encoder; 0 where its family names no encoder."""
    family = find_family(config.model_type)
    return _length(config, family.encoder_context) if family is not None and family.encoder_context else 0


def refuse_encoder(spec: ModelSpec) -> None:
    """Raise UnsupportedModel for a model that generates nothing: no layer of it keeps what it has read."""
    if not any(layer.reads_pool for layer in spec.layers):
        raise UnsupportedModel(
            f"{spec.name} is an encoder, which generates nothing",
            remedy="serve it with attnplug_transformers.Encoder, which gives hidden states",
        )


def refuse_headless(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel for a model whose outputs are no scores of next tokens: a base model, a classifier."""
    if not model.can_generate():
        raise UnsupportedModel(
            f"{type(model).__name__} gives no scores of next tokens",
            remedy="load the checkpoint with a class that generates, as AutoModelForCausalLM does",
        )


def refuse_decoder(spec: ModelSpec) -> None:
    """Raise UnsupportedModel for a model with layers that keep what they read: its rows are not whole inputs."""
    if any(layer.reads_pool for layer in spec.layers):
        raise UnsupportedModel(
            f"{spec.name} is no encoder: it generates", remedy="serve it with attnplug_transformers.Engine"
        )


def model_spec_from_path(path: str) -> ModelSpec | None:
    """Return the ModelSpec of a local model without reading its weights; None where ``path`` is none of transformers'.

    The entry point of ``attnplug explain --model``.

    Raises:
        UnsupportedModel: It is a transformers or GGUF model that cannot be served, or its config is broken.
    """
    from .model_source import find_local, open_model

    if not find_local(path):
        return None
    source = open_model(path)
    return source.model_spec(source.stored_dtype())


def _refuse_unservable(config: PretrainedConfig, family: Family | None) -> None:
    name, faults = config.model_type, []
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method, dequantised = _quantisation(quantised)
        if not dequantised:
            faults.append(f"its weights are quantised ({method}); allowed: float32, bfloat16, float16, or a .gguf file")
    if _is_composite(config):
        faults.append("it is multimodal (a config inside a config); allowed: text alone, as gemma3_text")
    remedy = "load the text model of an unquantised checkpoint, and save that with save_pretrained"
    if getattr(config, "is_encoder_decoder", False) and (family is None or not family.encoder_context):
        known = ", ".join(sorted(one.model_types[0] for one in families() if one.encoder_context))
        faults.append(f"it is an encoder-decoder, and no family with an adapter for one reads it; there are: {known}")
        remedy = "add a Family with encoder_context and an adapter (see docs/models.md)"
    if faults:
        raise UnsupportedModel(
            f"{name} model {getattr(config, 'name_or_path', '')!r} cannot be served: " + "; ".join(faults),
            remedy=remedy,
        )


def _is_composite(config: PretrainedConfig) -> bool:
    try:
        text = config.get_text_config()
    except ValueError:  # It holds several.
        return True
    return text is not config or any(getattr(config, name, None) for name in ("vision_config", "audio_config"))


def _quantisation(config: object) -> tuple[str, bool]:
    """Return the method, and whether loading undoes it: only a GGUF file's."""
    read = config.get if isinstance(config, dict) else lambda key, default=None: getattr(config, key, default)
    method = read("quant_method", "unknown method")
    method = str(getattr(method, "value", method))
    return method, method == "gguf" and bool(read("dequantize", False))


def _generic_layers(config: PretrainedConfig) -> tuple[LayerSpec, ...]:
    """Read an architecture without a family, if nothing in its config could be misread."""
    doubts = _doubts(config)
    if doubts:
        raise UnsupportedModel(
            f"no family reads architecture {config.model_type!r}, and the generic reading does not fit: "
            + "; ".join(doubts)
            + f". Families: {', '.join(known_model_types())}",
            remedy="add one: an entry point of group attnplug_transformers.families.v1 (see docs/models.md)",
        )
    return decoder_layers(config)


def _doubts(config: PretrainedConfig) -> list[str]:
    doubts = []
    if not _uses_attention_interface(config):
        doubts.append("transformers has no causal language model of it whose attention can be replaced")
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        return [*doubts, "it has no num_hidden_layers"]
    for one in {id(one): one for one in layer_configs(config)}.values():
        for name in ("num_attention_heads", "num_key_value_heads", "hidden_size"):
            if not isinstance(getattr(one, name, None), int):
                doubts.append(f"{name} is {getattr(one, name, None)!r}, not a number")
        doubts += [f"it sets {name}" for name in _STRANGE if getattr(one, name, None)]
    if not getattr(config, "rope_parameters", None):
        doubts.append("it has no rope_parameters: positions may be inside its attention")
    doubts = list(dict.fromkeys(doubts))
    types = getattr(config, "layer_types", None)
    strange = sorted(set(types or ()) - {FULL, SLIDING})
    if strange:
        doubts.append(f"its layer_types name {', '.join(strange)}")
    if not types and getattr(config, "sliding_window", None):
        doubts.append("it has a sliding_window, and no layer_types to say in which layers")
    return doubts


def _uses_attention_interface(config: PretrainedConfig) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    return bool(getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_supports_attention_backend", False))


def _context_len(config: PretrainedConfig, attribute: str) -> int:
    """Return the most positions a request may have.

    'dynamic' and 'longrope' choose their frequencies by the longest request of a batch, so beyond the original length
    one request would change another's tokens: the original length is the limit.
    """
    length = _length(config, attribute)
    for rope in _ropes(config):
        if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE:
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            length = min(length, int(original)) if original else length
    return length


def _ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the rotary embeddings' parameters: one, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_type = [one for one in rope.values() if isinstance(one, dict)]
    return by_type or [rope]


def _length(config: PretrainedConfig, attribute: str) -> int:
    length = getattr(config, attribute, None)
    if not isinstance(length, int) or length < 1:
        raise UnsupportedModel(
            f"{config.model_type}: {attribute} is {length!r}; allowed: a positive number",
            remedy="set it in config.json to the longest context the model was trained for",
        )
    return length
