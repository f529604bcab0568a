"""A third party's model: a Llama whose layers have different numbers of heads, with the family that reads it."""

from __future__ import annotations

import copy

from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from attnplug.model_spec import LayerSpec
from attnplug_transformers.adapters.decoder import DecoderAdapter
from attnplug_transformers.families import Family


class AcmeLlamaConfig(LlamaConfig):
    model_type = "acme_llama"


class AcmeLlamaForCausalLM(LlamaForCausalLM):
    config_class = AcmeLlamaConfig

    def __init__(self, config):
        super().__init__(config)
        for index, (heads, kv_heads) in enumerate(config.heads):
            own = copy.deepcopy(config)
            own.num_attention_heads, own.num_key_value_heads = heads, kv_heads
            attention = LlamaAttention(own, index)
            attention.config = config
            self.model.layers[index].self_attn = attention
        self.post_init()


AutoConfig.register("acme_llama", AcmeLlamaConfig, exist_ok=True)
AutoModelForCausalLM.register(AcmeLlamaConfig, AcmeLlamaForCausalLM, exist_ok=True)


def layers(config) -> tuple[LayerSpec, ...]:
    return tuple(
        LayerSpec(
            layer_id=index,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=config.head_dim,
            v_head_dim=config.head_dim,
            scaling=config.head_dim**-0.5,
        )
        for index, (heads, kv_heads) in enumerate(config.heads)
    )


class AcmeAdapter(DecoderAdapter):
    """Decoders as they are; counts its pools, so that a test sees that it served."""

    pools = 0

    def make_pool(self, spec, sizes):
        type(self).pools += 1
        return super().make_pool(spec, sizes)


FAMILY = Family("acme's", ("acme_llama",), layers, adapter="acme_llama:AcmeAdapter")
