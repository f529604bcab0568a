"""Encoders as layers, alone or before a decoder: what their configs ask, told without their modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnplug.errors import UnsupportedModel
from attnplug.model_spec import LayerSpec
from attnplug.modes import AttentionType

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["encoder_decoder_layers", "encoder_layers", "scaled_encoder_decoder_layers", "windowed_encoder_layers"]

_COUNTS = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads", "d_model")


def encoder_decoder_layers(config: PretrainedConfig, *, scales_queries: bool = False) -> tuple[LayerSpec, ...]:
    """Return the layers of an encoder-decoder with a config of BART's kind.

    Two stacks and the bridge between them are numbered apart: with L decoder and E encoder layers, 0 … L-1 is the
    decoder's self-attention, L … 2L-1 its attention to the encoder, 2L … 2L+E-1 the encoder's own.

    Args:
        config: The whole model's.
        scales_queries: The modules scale their queries by D^-½ themselves, so the factor on q·k is 1.

    Raises:
        UnsupportedModel: A count is missing, or heads do not divide the model's width.
    """
    faults = [f"{name} is {getattr(config, name, None)!r}; allowed: a positive number" for name in _missing(config)]
    read: Any = config
    if not faults:
        faults = [
            f"d_model {read.d_model} is no multiple of {name} {getattr(read, name)}"
            for name in _COUNTS[2:4]
            if read.d_model % getattr(read, name)
        ]
    if faults:
        raise UnsupportedModel(
            f"the attention of {config.model_type} cannot be read: " + "; ".join(faults), remedy="correct config.json"
        )
    count = read.decoder_layers

    def layer(index: int, heads: int, **changes: Any) -> LayerSpec:
        return _full_heads(index, heads, read.d_model // heads, 1.0 if scales_queries else None, **changes)

    heads = read.decoder_attention_heads
    encoder = AttentionType.ENCODER_ONLY
    return (
        *(layer(index, heads) for index in range(count)),
        *(layer(count + index, heads, is_cross_attention=True) for index in range(count)),
        *(
            layer(2 * count + index, read.encoder_attention_heads, attn_type=encoder)
            for index in range(read.encoder_layers)
        ),
    )


def scaled_encoder_decoder_layers(config: PretrainedConfig) -> tuple[LayerSpec, ...]:
    """Return the layers of an encoder-decoder whose modules scale their queries themselves, as Whisper's."""
    return encoder_decoder_layers(config, scales_queries=True)


def encoder_layers(config: PretrainedConfig) -> tuple[LayerSpec, ...]:
    """Return the layers of an encoder of BERT's kind: every row of a text sees every other.

    Raises:
        UnsupportedModel: It is configured as a decoder.
    """
    _refuse_decoder(config)
    return _encoder(config, [-1] * config.num_hidden_layers)


def windowed_encoder_layers(config: PretrainedConfig) -> tuple[LayerSpec, ...]:
    """Return the layers of an encoder of ModernBERT's kind, whose ``layer_types`` name local layers.

    A local layer's row sees the rows at most ``sliding_window`` before and after it: ``|p - k| <= w``.

    Raises:
        UnsupportedModel: A layer type that is neither.
    """
    _refuse_decoder(config)
    read: Any = config
    kinds = {"full_attention": -1, "sliding_attention": int(read.sliding_window)}
    strange = sorted(set(read.layer_types) - set(kinds))
    if strange:
        raise UnsupportedModel(
            f"{config.model_type}: its layer_types name {', '.join(strange)}; allowed: {', '.join(kinds)}",
            remedy="add a family for it: see docs/models.md",
        )
    return _encoder(config, [kinds[kind] for kind in read.layer_types])


def _encoder(config: PretrainedConfig, windows: list[int]) -> tuple[LayerSpec, ...]:
    heads = config.num_attention_heads
    return tuple(
        _full_heads(
            index,
            heads,
            config.hidden_size // heads,
            None,
            attn_type=AttentionType.ENCODER_ONLY,
            sliding_window_size=window,
        )
        for index, window in enumerate(windows)
    )


def _full_heads(index: int, heads: int, head_dim: int, scaling: float | None, **changes: Any) -> LayerSpec:
    return LayerSpec(
        layer_id=index,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        scaling=head_dim**-0.5 if scaling is None else scaling,
        **changes,
    )


def _missing(config: PretrainedConfig) -> list[str]:
    return [name for name in _COUNTS if not isinstance(getattr(config, name, None), int) or getattr(config, name) < 1]


def _refuse_decoder(config: PretrainedConfig) -> None:
    faults = [f"{name} is set" for name in ("is_decoder", "add_cross_attention") if getattr(config, name, False)]
    if getattr(config, "position_embedding_type", "absolute") not in (None, "absolute"):
        faults.append(f"position_embedding_type is {config.position_embedding_type!r}")
    if faults:
        raise UnsupportedModel(
            f"this {config.model_type} is no plain encoder: " + "; ".join(faults),
            remedy="serve the encoder, with both left out of config.json",
        )
