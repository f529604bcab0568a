"""Configs that say something rare: read as it is meant, or refused."""

from __future__ import annotations

import pytest
from transformers import Gemma3TextConfig, MistralConfig

from attnplug.errors import UnsupportedModel
from attnplug_transformers.model_spec import model_spec_from_config


@pytest.mark.parametrize("window", [0, -4])
def test_a_window_without_a_key_is_refused(window: int) -> None:
    config = MistralConfig(num_hidden_layers=2, sliding_window=window)
    with pytest.raises(UnsupportedModel, match=rf"sliding_window of layer 0 is {window}; allowed: at least 1, or null"):
        model_spec_from_config(config, dtype="float32")


def test_a_window_of_one_key_sees_the_query_itself_alone() -> None:
    spec = model_spec_from_config(MistralConfig(num_hidden_layers=2, sliding_window=1), dtype="float32")
    assert [layer.sliding_window_size for layer in spec.layers] == [0, 0]


def test_rope_of_one_layer_type_that_depends_on_the_batch_is_held_to_the_original_length() -> None:
    config = Gemma3TextConfig(num_hidden_layers=2, max_position_embeddings=512)
    assert model_spec_from_config(config, dtype="float32").max_context_len == 512
    config.rope_parameters["full_attention"] = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    assert model_spec_from_config(config, dtype="float32").max_context_len == 64
