"""What callers give encoder-decoders: an encoder's input, and the tokens that the decoder begins with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attnplug.errors import UnsupportedModel

from .detokenize import Tokenizer
from .encoder_input import EncoderInput
from .intake import Intake, Prompt
from .sizes import EngineSizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["EncoderIntake", "decoder_start"]

_DECODER = "decoder_input_ids"


class EncoderIntake(Intake):
    """Checks prompts of an encoder-decoder.

    A prompt is what the encoder reads: a text or token ids; or features, of one shape, where it takes those. As a
    mapping it names that (``input_ids``, ``input_features``) and may say the tokens that the decoder begins with
    (``decoder_input_ids``), in place of those of the generation config.

    Args:
        model: As for ``Intake``.
        tokenizer: As for ``Intake``.
        sizes: Contexts and pools.
        feature_shape: The shape of one input; None: tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer | None,
        sizes: EngineSizes,
        feature_shape: tuple[int, ...] | None,
    ) -> None:
        super().__init__(model, tokenizer, sizes)
        self._shape, self._dtype, self._device = feature_shape, model.dtype, model.device
        self._start = decoder_start(model)
        self._input = "input_ids" if feature_shape is None else "input_features"

    def _read(self, prompt: Prompt) -> tuple[tuple[int, ...], EncoderInput | None, list[str]]:
        given: Any = prompt
        start, faults = self._start, list[str]()
        if isinstance(prompt, Mapping):
            strange = sorted(set(map(str, prompt)) - {self._input, _DECODER})
            if strange or self._input not in prompt:
                allowed = f"allowed: {self._input}, and {_DECODER} where the decoder begins otherwise"
                return (), None, [f"it names {', '.join(map(str, prompt)) or 'nothing'}; {allowed}"]
            given = prompt[self._input]
            if _DECODER in prompt:
                start, found = self.encode(_flat(prompt[_DECODER]))
                faults += [f"{_DECODER}: {text}" for text in found]
        encoder, found = self._tokens(given) if self._shape is None else self._features(given, self._shape)
        faults += [f"{self._input}: {text}" for text in found]
        return start, encoder, faults or self._room_faults(encoder)

    def _tokens(self, given: Any) -> tuple[EncoderInput | None, list[str]]:
        tokens, faults = self.encode(_flat(given))
        faults = faults or self.token_faults(tokens)
        return (None, faults) if faults else (EncoderInput(len(tokens), tokens), [])

    def _features(self, given: Any, shape: tuple[int, ...]) -> tuple[EncoderInput | None, list[str]]:
        if not isinstance(given, Tensor):
            return None, [f"it is {type(given).__name__}; allowed: a tensor of {shape}, as the feature extractor makes"]
        features = given[0] if given.dim() == len(shape) + 1 and given.shape[0] == 1 else given
        if tuple(features.shape) != shape or not features.is_floating_point():
            return None, [f"it is {tuple(given.shape)} {given.dtype}; allowed: {shape} of a float dtype"]
        ready = features.to(device=self._device, dtype=self._dtype)
        return EncoderInput(self._sizes.max_encoder_len, features=ready), []

    def _room_faults(self, encoder: EncoderInput | None) -> list[str]:
        assert encoder is not None  # without faults it was made
        sizes, rows, faults = self._sizes, encoder.num_rows, []
        if rows > sizes.max_encoder_len:
            faults.append(f"{rows} tokens for an encoder of {sizes.max_encoder_len}; allowed: at most that many")
        if rows > sizes.num_encoder_pages * sizes.page_size:
            faults.append(
                f"{rows} encoder rows need more than the encoder space's {sizes.num_encoder_pages} pages of "
                f"{sizes.page_size}"
            )
        return faults


def decoder_start(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the tokens that a decoder begins with by the generation config: its start, and a forced first token.

    Raises:
        UnsupportedModel: No config names a start token.
    """
    configs: list[Any] = [getattr(model, "generation_config", None), model.config]
    for name in ("decoder_start_token_id", "bos_token_id"):
        ids = [getattr(config, name, None) for config in configs]
        start = next((one for one in ids if isinstance(one, int)), None)
        if start is not None:
            forced = [getattr(config, "forced_bos_token_id", None) for config in configs]
            return (start, *[one for one in forced if isinstance(one, int)][:1])
    raise UnsupportedModel(
        f"{type(model).__name__} does not say what its decoder begins with",
        remedy="set decoder_start_token_id in generation_config.json",
    )


def _flat(given: Any) -> Any:
    """Return token ids as a list: also of a tensor, with or without a batch dimension of 1."""
    if not isinstance(given, Tensor):
        return given
    return (given[0] if given.dim() == 2 and given.shape[0] == 1 else given).tolist()
