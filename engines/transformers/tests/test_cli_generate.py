"""``attnplug generate``: texts on standard output, all else on standard error, one clear message a fault."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from attnplug.cli import main
from attnplug.errors import OutOfPages
from attnplug_transformers import verify

NATIVE = ["--prefill", "torch_native", "--decode", "torch_native"]


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str], saved_llama: Path) -> Callable[..., Result]:
    def call(*arguments: str, model: str | None = None) -> Result:
        code = main(["generate", "--model", model or str(saved_llama), *arguments])
        return Result(code, *capsys.readouterr())

    return call


def test_json_holds_the_completions_and_standard_output_nothing_else(generate: Callable[..., Result]) -> None:
    prompts = ["--prompt", "one", "--prompt", "another prompt"]
    result = generate(*NATIVE, *prompts, "--max-new-tokens", "9", "--page-size", "4", "--json")
    data = json.loads(result.out)
    assert result.code == 0
    assert [one["prompt"] for one in data["completions"]] == ["one", "another prompt"]
    assert data["tokens"] == sum(len(one["token_ids"]) for one in data["completions"])
    assert all(one["finish_reason"] in ("stop", "length") for one in data["completions"])
    assert (data["prefill"], data["decode"], data["page_size"]) == ("torch_native", "torch_native", 4)
    assert data["verify"] is None
    assert "tokens/s" in result.err


def test_graphs_are_chosen_on_the_command_line_and_what_was_replayed_is_in_the_json(
    generate: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNPLUG_GRAPHS", "auto")
    few = [*NATIVE, "--prompt", "one", "--max-new-tokens", "3", "--device", "cpu", "--json"]
    off = json.loads(generate(*few, "--graphs", "off").out)["graphs"]
    assert (off["refusal"], off["replays"], off["eager_steps"]) == ("graphs are off", 0, {"graphs are off": 3})
    assert json.loads(generate(*few).out)["graphs"]["refusal"] == "graphs need a GPU; this engine runs on cpu"
    wrong = generate(*few, "--graphs", "on")
    assert wrong.code == 2
    assert "attention.graphs" in wrong.err


def test_verify_says_identical(generate: Callable[..., Result]) -> None:
    prompts = [part for i in range(5) for part in ("--prompt", "text " * (i + 1))]
    result = generate(*NATIVE, *prompts, "--max-new-tokens", "8", "--chunk-size", "7", "--verify")
    assert result.code == 0
    assert result.out.splitlines()[-1] == "identical"


def test_verify_says_where_it_first_differs_and_exits_with_1(
    generate: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = verify.eager_greedy

    def wrong(model: Any, prompt: Any, count: int) -> list[int]:
        tokens = real(model, prompt, count)
        return tokens if len(prompt) == 3 else [*tokens[:2], 7, *tokens[3:]]

    monkeypatch.setattr(verify, "eager_greedy", wrong)
    arguments = [*NATIVE, "--prompt", "abc", "--prompt", "abcd", "--max-new-tokens", "6", "--verify"]
    result = generate(*arguments)
    assert result.code == 1
    assert "differs: prompt 1, new token 2: attnplug gives" in result.out
    data = json.loads(generate(*arguments, "--json").out)
    assert (data["verify"]["prompt"], data["verify"]["position"], data["verify"]["theirs"]) == (1, 2, 7)


def test_a_completion_that_ends_early_is_a_difference(saved_llama: Path) -> None:
    from attnplug_transformers.loading import load_model

    model = load_model(str(saved_llama)).model
    full = verify.eager_greedy(model, [5, 6, 7], 6)
    options = {"max_new_tokens": 6, "max_context_len": 256}
    assert verify.find_difference(model, [[5, 6, 7]], [full], **options) is None
    found = verify.find_difference(model, [[5, 6, 7]], [full[:4]], **options)
    assert found == verify.Difference(0, 4, None, full[4])


def test_streamed_text_is_the_same_text(generate: Callable[..., Result]) -> None:
    arguments = [*NATIVE, "--prompt", "abc", "--prompt", "x", "--prompt", "hello", "--max-new-tokens", "7"]
    whole, streamed = generate(*arguments), generate(*arguments, "--stream")
    assert streamed.out.split() == whole.out.split()
    assert [line for line in streamed.out.splitlines() if line.startswith("[")][2] == "[3/3] hello"


def test_prompts_come_from_a_file_too(generate: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("first line\n\nsecond line\n", encoding="utf-8")
    options = ["--prompts-file", str(path), "--prompt", "zero", "--max-new-tokens", "2", "--json"]
    data = json.loads(generate(*NATIVE, *options).out)
    assert [one["prompt"] for one in data["completions"]] == ["zero", "first line", "second line"]


def test_backends_come_from_a_configuration_file(generate: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "attn.toml"
    path.write_text('[attention]\nprefill = "torch_native"\ndecode = "torch_native"\npage_size = 2\n')
    data = json.loads(generate("--config", str(path), "--prompt", "a", "--max-new-tokens", "2", "--json").out)
    assert data["page_size"] == 2


def test_one_seed_gives_one_text(generate: Callable[..., Result]) -> None:
    options = [*NATIVE, "--prompt", "abc", "--max-new-tokens", "12", "--temperature", "1.5", "--json"]

    def tokens(seed: str) -> Any:
        return json.loads(generate(*options, "--seed", seed).out)["completions"][0]["token_ids"]

    assert tokens("1") == tokens("1")
    assert tokens("1") != tokens("2")


BAD: dict[str, tuple[list[str], str]] = {
    "no prompt": ([], "there is no prompt"),
    "an empty prompt": (["--prompt", "a", "--prompt", ""], "prompt 1 is empty"),
    "an unknown backend": (["--prompt", "a", "--prefill", "torch_nativ"], "torch_native"),
    "a wrong page size": (["--prompt", "a", "--page-size", "0"], "page_size is 0"),
    "a wrong dtype": (["--prompt", "a", "--dtype", "int3"], "dtype is 'int3'"),
    "a wrong device": (["--prompt", "a", "--device", "abacus"], "device 'abacus'"),
    "no new tokens": (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
    "a page size that no pool has": (["--prompt", "a", "--page-size", "3"], "page_size is 3; allowed: 1, 2, 4"),
    "a batch beyond the memory": (["--prompt", "a", "--max-batch-size", "9" * 13], "there is no memory for"),
    "bytes that are no UTF-8": (["--prompt", "a", "--prompt", "b\udcff"], r"prompt 1: character 1 is '\udcff'"),
    "no model": (["--prompt", "a", "--model", ""], "the model's name is empty"),
    "no device": (["--prompt", "a", "--device", ""], "device '' is none"),
    "a prompt longer than the context": (["--prompt", "a" * 300], "context of 256"),
    "no chat template": (["--prompt", "a", "--chat"], "no chat template"),
    "a negative temperature": (["--prompt", "a", "--temperature", "-1"], "temperature is -1"),
    "verify with sampling": (["--prompt", "a", "--verify", "--temperature", "1"], "--verify compares"),
    "a file of prompts that is not there": (["--prompts-file", "/no/such/file"], "cannot be read"),
    "a configuration that is not there": (["--prompt", "a", "--config", "/no/attn.toml"], "/no/attn.toml"),
    "an option that does not exist": (["--prompt", "a", "--beams", "3"], "--beams"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_the_user_must_mend_is_one_message_and_exit_code_2(case: str, generate: Callable[..., Result]) -> None:
    arguments, word = BAD[case]
    result = generate(*arguments)
    assert result.code == 2
    assert word in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


@pytest.mark.parametrize("model", ["/no/such/model", "smolm2.gguf"])
def test_a_bad_model_path_is_one_message_and_exit_code_2(model: str, generate: Callable[..., Result]) -> None:
    result = generate("--prompt", "a", model=model)
    assert result.code == 2
    assert "no such model" in result.err
    assert "Traceback" not in result.err


def test_a_request_that_fails_is_told_and_the_others_are_printed(
    generate: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnplug_transformers import Engine
    from attnplug_transformers.results import StreamChunk

    def stream(self: Engine, *_: Any) -> Any:
        yield StreamChunk(0, (70,), "e", "length")
        yield StreamChunk(1, (), "", "error", str(OutOfPages("no pages are left")))

    monkeypatch.setattr(Engine, "generate_stream", stream)
    result = generate(*NATIVE, "--prompt", "first", "--prompt", "second")
    assert result.code == 2
    assert "[1/2] first\ne\n" in result.out
    assert "prompt 1: no pages are left" in result.err


def test_the_installed_command_ends_a_fault_without_a_traceback() -> None:
    command = [sys.executable, "-m", "attnplug", "generate", "--model", "/no/such/model", "--prompt", "a"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "attnplug: error: no such model" in result.stderr


def test_a_backend_that_raises_in_a_step_is_one_message_with_its_place(
    generate: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnplug_torch_native.backend import TorchNativeBackend

    def broken(self: Any, *_: Any, **__: Any) -> None:
        raise ZeroDivisionError("the kernel's own fault")

    monkeypatch.setattr(TorchNativeBackend, "forward_extend", broken)
    result = generate(*NATIVE, "--prompt", "abc")
    assert result.code == 2
    assert (
        "a step failed (prefill torch_native, decode torch_native): ZeroDivisionError: the kernel's own" in result.err
    )
    assert "test_cli_generate.py" in result.err
    assert "Traceback" not in result.err
