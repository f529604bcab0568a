"""Load a transformers model and its tokenizer: all of it, or one clear error."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnplug.errors import AttnplugError, ConfigError, UnsupportedModel

from .families import find_family
from .model_source import open_model
from .model_spec import model_spec_from_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from attnplug.model_spec import ModelSpec

__all__ = ["CheckpointSource", "LoadedModel", "dtype_name", "load_model", "resolve_device", "resolve_dtype"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUB_SECONDS = 10.0
_ROW_HEADS = ("ForMaskedLM", "ForTokenClassification")
_OTHER_HEADS = ("Classification", "QuestionAnswering", "MultipleChoice", "RewardModel")
_GENERATING = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for the engine."""

    model: PreTrainedModel
    """In eval mode, on its device, with attention 'eager' until an engine takes it."""
    tokenizer: PreTrainedTokenizerBase | None
    """None where the checkpoint has none: prompts are token ids then."""
    spec: ModelSpec
    label: str = ""


def load_model(
    path_or_id: str, *, dtype: str | torch.dtype = "auto", device: str | torch.device | None = None
) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        path_or_id: See ``model_source.open_model``.
        dtype: float32, bfloat16, float16 or auto; see ``resolve_dtype``. Quantised GGUF weights are expanded to it.
        device: Where the weights go; this machine's first GPU, or its CPU, by default.

    Raises:
        ConfigError: A device that is not here, or a dtype that the engine does not compute in.
        UnsupportedModel: It is absent, damaged, incomplete, or of a kind that the engine does not serve.
    """
    place, source = resolve_device(device), open_model(path_or_id)
    wanted = resolve_dtype(dtype, place, source.stored_dtype())
    source.model_spec(dtype_name(wanted))  # Refuses before any weight is read.
    return source.load(dtype=wanted, device=place)


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Return a device that is in this machine; None: its first GPU, else its CPU.

    Raises:
        ConfigError: torch knows no such device, or it is not here.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    allowed = ", ".join(["cpu", *(f"cuda:{i}" for i in range(count))])
    try:
        place = torch.device(("cuda" if count else "cpu") if device is None else device)
    except RuntimeError as error:
        raise ConfigError(
            f"device {device!r} is none; allowed: {allowed}", key="device", value=str(device), allowed=allowed
        ) from error
    if place.type == "cpu" or (place.type == "cuda" and (place.index or 0) < count):
        return place
    raise ConfigError(
        f"device {str(place)!r} is not in this machine; allowed: {allowed}",
        key="device",
        value=str(place),
        allowed=allowed,
    )


def resolve_dtype(dtype: str | torch.dtype, device: torch.device, stored: str) -> torch.dtype:
    """Return the dtype to compute in. "auto" is float32 on a CPU, elsewhere what is stored, bfloat16 for float32.

    Raises:
        ConfigError: A dtype that the engine does not compute in.
    """
    name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else stored if stored in ("bfloat16", "float16") else "bfloat16"
    if name not in DTYPES:
        allowed = f"auto, {', '.join(DTYPES)}"
        raise ConfigError(f"dtype is {name!r}; allowed: {allowed}", key="dtype", value=name, allowed=allowed)
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, without the module."""
    return str(dtype).removeprefix("torch.")


@dataclass(slots=True)
class CheckpointSource:
    """A folder, a GGUF file or a Hub id that transformers itself loads."""

    where: str
    label: str
    gguf_file: str | None = None
    tried: str = ""
    """Why ``where`` is nothing local; it is asked of the Hub then."""
    _config: PretrainedConfig | None = field(default=None, repr=False)
    _local_only: bool = field(default=False, repr=False)
    """The Hub does not answer, and the model is in its cache."""

    def config(self) -> PretrainedConfig:
        """Return its config, read once.

        Raises:
            UnsupportedModel: It cannot be read.
        """
        if self._config is None:
            from transformers import AutoConfig

            if self.gguf_file is not None:
                _require("gguf", "accelerate")
            with self._faults("config"):
                if self.tried:
                    self._local_only = not _hub_answers(self.where)
                self._config = AutoConfig.from_pretrained(self.where, **self._options())
        return self._config

    def stored_dtype(self) -> str:
        """Return the dtype of the weights; float32 for GGUF, whose blocks are expanded, and where none is named."""
        dtype = getattr(self.config(), "dtype", None)
        return dtype_name(dtype) if isinstance(dtype, torch.dtype) else str(dtype or "float32")

    def model_spec(self, dtype: str) -> ModelSpec:
        """Return what it asks of attention.

        Raises:
            UnsupportedModel: It cannot be served, or was saved with another head than one that generates.
        """
        config = self.config()
        config.name_or_path = self.label
        _refuse_classifier(config)
        return model_spec_from_config(config, dtype=dtype)

    def load(self, *, dtype: torch.dtype, device: torch.device) -> LoadedModel:
        """Load weights and tokenizer.

        Raises:
            UnsupportedModel: Files are missing or damaged, or weights are missing from them.
        """
        import transformers

        spec = self.model_spec(dtype_name(dtype))
        options = self._options()
        if self.gguf_file is not None:
            options |= _dequantised()
        with self._faults("weights"):
            # With its config given, transformers does not parse the file once more: seconds, for a GGUF's vocabulary.
            model, info = getattr(transformers, _auto_class(self.config())).from_pretrained(
                self.where,
                config=copy.deepcopy(self.config()),
                dtype=dtype,
                attn_implementation="eager",
                output_loading_info=True,
                **options,
            )
        absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
        if absent:
            shown = ", ".join(absent[:4]) + (f" and {len(absent) - 4} more" if len(absent) > 4 else "")
            raise UnsupportedModel(
                f"model {self.label!r} is incomplete: its files lack {len(absent)} weights: {shown}",
                remedy="copy the checkpoint again, with every .safetensors file that its index names",
            )
        tokenizer = self._tokenizer()
        return LoadedModel(model.eval().to(device), tokenizer, spec, self.label)

    def _tokenizer(self) -> PreTrainedTokenizerBase | None:
        from transformers import AutoTokenizer

        folder = Path(self.where)
        if self.gguf_file is None and folder.is_dir() and not any((folder / f).is_file() for f in _TOKENIZER_FILES):
            return None
        with self._faults("tokenizer"):
            return AutoTokenizer.from_pretrained(self.where, **self._options())

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {} if self.gguf_file is None else {"gguf_file": self.gguf_file}
        return options | {"local_files_only": True} if self._local_only else options

    @contextmanager
    def _faults(self, part: str) -> Iterator[None]:
        """Raise whatever a damaged file makes of transformers and its readers as one error."""
        try:
            yield
        except AttnplugError:
            raise
        # Foreign code: transformers, safetensors, tokenizers and gguf raise without a common base on damaged files.
        except Exception as error:
            tried = f"{self.tried}; the Hub was asked: " if self.tried else ""
            raise UnsupportedModel(
                f"the {part} of model {self.label!r} cannot be loaded: {tried}{_short(error)}",
                remedy="give a local folder or .gguf file, or download the model first"
                if self.tried
                else "check that the files are complete, and that the installed transformers knows the architecture",
            ) from error


def _auto_class(config: PretrainedConfig) -> str:
    """Return the family's class; an encoder's heads that score every row are loaded where the checkpoint has one."""
    family = find_family(config.model_type)
    name = "AutoModelForCausalLM" if family is None else family.auto_class
    if name != "AutoModel":
        return name
    saved = (getattr(config, "architectures", None) or [""])[0]
    return next((f"AutoModel{head}" for head in _ROW_HEADS if saved.endswith(head)), name)


def _refuse_classifier(config: PretrainedConfig) -> None:
    """Raise UnsupportedModel for a classifier, whose tied embeddings would else pass for a head of tokens."""
    saved = (getattr(config, "architectures", None) or [""])[0]
    if saved.endswith(_OTHER_HEADS) and _auto_class(config) in _GENERATING:
        raise UnsupportedModel(
            f"model {config.name_or_path!r} was saved as {saved}, which gives no scores of next tokens",
            remedy="give a checkpoint of a model that generates",
        )


def _hub_answers(model_id: str) -> bool:
    """Ask the Hub once for a model, since transformers repeats for half a minute where there is no network.

    Returns:
        Whether it answers; False where it does not and the model is in the cache. Else what it said is raised.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        HfApi().model_info(model_id, timeout=_HUB_SECONDS)
    # Foreign code: the client's errors depend on the HTTP library that it was built on.
    except Exception:
        if isinstance(try_to_load_from_cache(model_id, "config.json"), str):
            return False
        raise
    return True


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2])
    return f"{type(error).__name__}: {text[:300]}"


def _require(*modules: str) -> None:
    import importlib.util

    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedModel(
            f"a GGUF file needs {' and '.join(missing)}, not installed here",
            remedy="pip install 'attnplug-transformers[gguf]'",
        )


def _dequantised() -> dict[str, Any]:
    """Ask for plain weights: newer transformers keeps a GGUF's blocks packed where a kernel for them is installed."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
