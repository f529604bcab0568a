"""GlassLLM's weights as a transformers Llama: the same function, from NumPy arrays."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnplug.errors import UnsupportedModel

from .loading import LoadedModel, dtype_name
from .model_spec import model_spec_from_config

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerBase

    from attnplug.model_spec import ModelSpec

_SPACE = "▁"
_PAD, _UNK, _BOS, _EOS = _SPECIALS = ("<pad>", "<unk>", "<bos>", "<eos>")
_CHUNK = rf"\n|{_SPACE}*[^{_SPACE}\n]+|{_SPACE}+"
"""What merges never cross: a line's end, and a word with the spaces before it."""


@dataclass(frozen=True, slots=True)
class GlassSource:
    """One language's weights, beside its tokenizer."""

    weights: Path
    label: str

    def config(self) -> LlamaConfig:
        """Return GlassLLM's hyperparameters in Llama's terms.

        Raises:
            UnsupportedModel: The file cannot be read.
        """
        from transformers import LlamaConfig

        raw = json.loads(str(self._arrays("__config__")["__config__"]))
        return LlamaConfig(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["d_model"],
            intermediate_size=8 * raw["d_model"] // 3,
            num_hidden_layers=raw["n_layers"],
            num_attention_heads=raw["n_heads"],
            num_key_value_heads=raw["n_kv_heads"],
            max_position_embeddings=raw["max_len"],
            rms_norm_eps=raw["eps"],
            rope_parameters={"rope_type": "default", "rope_theta": raw["rope_base"]},
            tie_word_embeddings=True,
            # It was trained on one running text: it neither begins nor ends.
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
            name_or_path=self.label,
        )

    def stored_dtype(self) -> str:
        """Return float16, what the file holds; it computes in float32."""
        return "float16"

    def model_spec(self, dtype: str) -> ModelSpec:
        """Return what it asks of attention."""
        return model_spec_from_config(self.config(), dtype=dtype)

    def load(self, *, dtype: torch.dtype, device: torch.device) -> LoadedModel:
        """Map the weights and make the tokenizer.

        Raises:
            UnsupportedModel: A file is missing, damaged, or of another shape than its hyperparameters say.
        """
        from transformers import LlamaForCausalLM

        config, spec = self.config(), self.model_spec(dtype_name(dtype))
        state = llama_state(self._arrays(), config)
        tokenizer = glass_tokenizer(self.weights.with_name(self.weights.name.replace(".npz", ".tokenizer.json")))
        config._attn_implementation = "eager"
        model = LlamaForCausalLM(config)
        try:
            absent = [key for key in model.load_state_dict(state, strict=False).missing_keys if key != "lm_head.weight"]
        except RuntimeError as error:
            raise self._damaged(error) from error
        if absent:
            raise self._damaged(f"it lacks {', '.join(absent)}")
        model = model.to(dtype=dtype, device=device).eval()
        return LoadedModel(model, tokenizer, spec, self.label)

    def _arrays(self, *names: str) -> dict[str, Any]:
        import numpy as np

        try:
            with np.load(self.weights) as data:
                return {name: data[name] for name in names or data.files}
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise self._damaged(error) from error

    def _damaged(self, why: object) -> UnsupportedModel:
        return UnsupportedModel(
            f"model {self.label!r}: {self.weights} cannot be used: {why}",
            remedy="pip install --no-deps --force-reinstall glassllm",
        )


def llama_state(arrays: dict[str, Any], config: LlamaConfig) -> dict[str, Tensor]:
    """Return GlassLLM's arrays as Llama's weights, float32.

    GlassLLM multiplies rows by matrices, so every one is transposed; and it rotates neighbouring pairs of a head's
    coordinates where Llama rotates halves, so the rows of queries and keys are put in the order evens, odds. Scores
    are sums over a head's coordinates and do not notice.
    """
    heads = {"W_Q": config.num_attention_heads, "W_K": config.num_key_value_heads}

    def matrix(name: str) -> Tensor:
        weight = torch.from_numpy(arrays[name]).float().T
        rotated = heads.get(name.rsplit(".", 1)[1])
        if rotated is None:
            return weight.contiguous()
        by_pair = weight.reshape(rotated, -1, 2, weight.shape[1])
        return by_pair.transpose(1, 2).reshape(weight.shape).contiguous()

    def vector(name: str) -> Tensor:
        return torch.from_numpy(arrays[name]).float()

    state = {"model.embed_tokens.weight": vector("E"), "model.norm.weight": vector("norm_f.gamma")}
    for i in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{i}", f"blocks.{i}"
        state[f"{ours}.input_layernorm.weight"] = vector(f"{theirs}.norm1.gamma")
        state[f"{ours}.post_attention_layernorm.weight"] = vector(f"{theirs}.norm2.gamma")
        for llama, glass in (("q", "Q"), ("k", "K"), ("v", "V"), ("o", "O")):
            state[f"{ours}.self_attn.{llama}_proj.weight"] = matrix(f"{theirs}.attn.W_{glass}")
        for llama, glass in (("gate", "1"), ("up", "3"), ("down", "2")):
            state[f"{ours}.mlp.{llama}_proj.weight"] = matrix(f"{theirs}.ffn.W{glass}")
    return state


def glass_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Return GlassLLM's byte-pair encoding as a transformers tokenizer.

    Raises:
        UnsupportedModel: The file is missing or damaged.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        alphabet, merges = list(data["alphabet"]), [(left, right) for left, right in data["merges"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnsupportedModel(
            f"tokenizer {path} cannot be read: {type(error).__name__}: {error}",
            remedy="pip install --no-deps --force-reinstall glassllm",
        ) from error
    words = [*_SPECIALS, *alphabet, *(left + right for left, right in merges)]
    # A word that two merges make keeps its last id, as GlassLLM's own table does.
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges, unk_token=_UNK))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", _SPACE)])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_CHUNK), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=_UNK,
        pad_token=_PAD,
        bos_token=_BOS,
        eos_token=_EOS,
        clean_up_tokenization_spaces=False,
    )
