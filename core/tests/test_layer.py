"""The attention layer's own answers, before any backend is asked."""

import pytest
import torch

from attnplug.layer import AttentionLayer
from attnplug.modes import AttentionType


@pytest.mark.parametrize(
    ("attn_type", "is_cross_attention", "causal"),
    [
        (AttentionType.DECODER, False, True),
        (AttentionType.DECODER, True, False),
        (AttentionType.DECODER_BIDIRECTIONAL, False, False),
        (AttentionType.ENCODER_ONLY, False, False),
    ],
)
def test_only_a_decoders_self_attention_is_causal(attn_type, is_cross_attention, causal):
    layer = AttentionLayer(4, 8, 1.0, 2, 0, attn_type=attn_type, is_cross_attention=is_cross_attention)
    assert layer.causal is causal


def test_a_layer_and_its_spec_describe_each_other():
    layer = AttentionLayer(
        4, 8, 0.5, 2, 3, v_head_dim=6, logit_cap=20.0, sliding_window_size=7, sinks=torch.zeros(4), k_scale=0.5
    )
    spec = layer.spec
    assert (spec.layer_id, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim) == (3, 4, 2, 8, 6)
    assert (spec.sliding_window_size, spec.logit_cap, spec.has_sinks, spec.has_kv_scales) == (7, 20.0, True, True)
    assert AttentionLayer.from_spec(spec, sinks=torch.zeros(4), k_scale=0.5).spec == spec


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads 3"),
        ({"sinks": torch.zeros(5)}, r"sinks have shape \(5,\)"),
        ({"logit_capping_method": "clip"}, "logit_capping_method 'clip'"),
    ],
)
def test_a_layer_that_cannot_exist_is_refused_by_name(options, named):
    arguments = {"num_heads": 4, "head_dim": 8, "scaling": 1.0, "num_kv_heads": 2, "layer_id": 0, **options}
    with pytest.raises(ValueError, match=named):
        AttentionLayer(**arguments)
