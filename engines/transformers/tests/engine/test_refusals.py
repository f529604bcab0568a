"""What can never work is refused at once, with every reason, and nothing half-built stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaForSequenceClassification

from attnplug.decision import Candidate
from attnplug.errors import BackendIncompatible, BackendRejected, ConfigError, UnknownBackend, UnsupportedModel
from attnplug.lock import load_lock, write_lock
from attnplug_transformers import Engine, RequestRefused
from attnplug_transformers.errors import EngineError


def test_all_bad_prompts_are_named_before_anything_runs(llama, serve):
    engine = serve(llama, max_context_len=100, num_pages=4, page_size=16, kv_cache_bytes=None)
    with pytest.raises(RequestRefused) as caught:
        engine.generate([[1, 2], [], list(range(100)), [1] * 70, [999], "text", 5], [4, 4, 4, 4, 0, 4, 4])
    problems = caught.value.problems
    assert sorted(problems) == [1, 2, 3, 4, 5, 6]
    assert "no tokens" in problems[1][0]
    assert "context of 100" in problems[2][0]
    assert "4 pages of 16" in problems[2][1]
    assert "4 pages of 16" in problems[3][0]
    assert "999 is outside the vocabulary" in problems[4][0]
    assert "max_new_tokens is 0" in problems[4][1]
    assert "no tokenizer" in problems[5][0]
    assert "int" in problems[6][0]
    assert "prompt 3: 70 tokens" in str(caught.value)
    assert not engine.has_work


@pytest.mark.parametrize("prompt", [b"\1\2", bytearray(2)], ids=["bytes", "bytearray"])
def test_bytes_are_no_token_ids(llama, serve, prompt):
    with pytest.raises(RequestRefused, match="allowed: a text, or a list of token ids"):
        serve(llama).generate([prompt])


def test_a_pool_beyond_the_memory_is_refused(llama, serve):
    with pytest.raises(ConfigError, match="there is no memory for 100000000 pages of 16 tokens"):
        serve(llama, num_pages=100_000_000, page_size=16, kv_cache_bytes=None)


def test_one_text_in_place_of_a_list_is_refused(llama, serve):
    with pytest.raises(ConfigError, match="a list of texts"):
        serve(llama).generate("hello")


@pytest.mark.parametrize("prompts", [None, 5, {"input_ids": [1]}], ids=str)
def test_what_is_no_list_of_prompts_is_refused(llama, serve, prompts):
    with pytest.raises(ConfigError, match=r"prompts is .* a list of texts"):
        serve(llama).generate(prompts)


@pytest.mark.parametrize("limit", [5.0, None, "5", [2.5], [None]], ids=str)
def test_a_limit_that_is_no_whole_number_is_refused(llama, serve, limit):
    with pytest.raises(ConfigError, match=r"max_new_tokens is .* a whole number"):
        serve(llama).generate([[1]], limit)


@pytest.mark.parametrize("sampling", [0.7, {"temperature": 1.0}, [None], [{"top_k": 1}]], ids=str)
def test_sampling_of_another_type_is_refused(llama, serve, sampling):
    with pytest.raises(ConfigError, match=r"sampling is .* allowed: SamplingParams"):
        serve(llama).generate([[1]], 2, sampling)


def test_prompts_and_limits_of_numpy_and_a_generator_are_taken(llama, serve):
    import numpy as np

    engine = serve(llama)
    (want,) = engine.generate([[3, 4]], 3)
    assert engine.generate(np.array([[3, 4]]), np.int64(3)) == [want]
    assert engine.generate(iter([[3, 4]]), 3) == [want]


@pytest.mark.parametrize("model", [None, "smollm2", torch.nn.Linear(2, 2)], ids=["None", "a name", "a layer"])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(ConfigError, match="allowed: a model of transformers"):
        Engine(model)


def test_a_model_without_a_head_for_tokens_is_refused(llama):
    with pytest.raises(UnsupportedModel, match="LlamaModel gives no scores of next tokens"):
        Engine(llama.model.model, num_pages=4)
    classifier = LlamaForSequenceClassification(llama.model.config)
    with pytest.raises(UnsupportedModel, match="LlamaForSequenceClassification gives no scores of next tokens"):
        Engine(classifier, num_pages=4)


def test_a_device_that_torch_does_not_know_is_refused(llama, serve):
    with pytest.raises(ConfigError, match="'tpu' names no device"):
        serve(llama, device="tpu")


def test_a_limit_for_another_number_of_prompts_is_refused(llama, serve):
    with pytest.raises(ConfigError, match="2 values for 1 prompts"):
        serve(llama).generate([[1]], [3, 4])


def test_sizes_that_cannot_be_are_named_together(llama, serve):
    with pytest.raises(ConfigError) as caught:
        serve(llama, max_batch_size=0, chunk_size=-1, max_context_len=4096, num_pages=5)
    text = str(caught.value)
    for part in ("max_batch_size is 0", "chunk_size is -1", "at most the model's 512", "both given"):
        assert part in text


@pytest.mark.parametrize("size", ["max_batch_size", "chunk_size", "max_context_len", "num_pages"])
def test_a_size_that_is_no_whole_number_is_refused(llama, serve, size):
    with pytest.raises(ConfigError, match=rf"{size} is 2\.5; allowed: a whole number"):
        serve(llama, **{"kv_cache_bytes": None, size: 2.5})


def test_a_pool_too_small_for_a_page_is_refused(llama, serve):
    with pytest.raises(ConfigError, match="at least two pages"):
        serve(llama, kv_cache_bytes=1000)


def test_an_impossible_page_size_is_refused(llama, serve):
    with pytest.raises((ConfigError, BackendRejected), match="page_size"):
        serve(llama, page_size=7)


def test_a_loaded_model_elsewhere_than_said_is_refused(llama, serve):
    with pytest.raises(ConfigError, match=r"device is cuda.*dtype is bfloat16"):
        serve(llama, device="cuda", dtype="bfloat16")


def test_an_unknown_backend_is_refused(llama):
    with pytest.raises(UnknownBackend, match="torch_native"):
        Engine(llama.model, attention={"attention": {"prefill": "torch_natve"}})


def test_a_configuration_file_is_read(llama, prompts, expected, tmp_path):
    file = tmp_path / "attn.toml"
    file.write_text('[attention]\nprefill = "torch_native"\ndecode = "auto"\npage_size = 32\n')
    engine = Engine(llama.model, attention=file, num_pages=40)
    assert engine.sizes.page_size == 32
    assert engine.decision is not None
    assert engine.decision.decode == "torch_native"
    assert engine.generate(prompts[:1], 24)[0].token_ids == expected[0]
    assert Engine(llama.model, attention=file, page_size=64, num_pages=40).sizes.page_size == 64


def test_a_rank_serves_what_another_decided(llama, prompts, expected, serve, tmp_path):
    first = serve(llama, page_size=32)
    write_lock(first.decision, tmp_path / "attn.lock")
    lock = load_lock(tmp_path / "attn.lock")
    # What this rank's own configuration asks for does not count.
    engine = Engine(llama.model, attention={"attention": {"prefill": "absent", "page_size": 16}}, decision=lock)
    assert (engine.decision, engine.sizes.page_size) == (lock, 32)
    assert engine.generate(prompts[:1], 24)[0].token_ids == expected[0]
    other = replace(lock, choices=tuple(replace(one, chosen=Candidate("x", "acme", "1")) for one in lock.choices))
    with pytest.raises(BackendIncompatible, match="'x'"):
        Engine(llama.model, decision=other)


def test_a_closed_engine_serves_nothing_more(llama, serve):
    engine = serve(llama)
    engine.close()
    for call in (
        lambda: engine.generate([[1]]),
        lambda: engine.generate_stream([[1]]),
        lambda: engine.add_request([1]),
    ):
        with pytest.raises(EngineError, match="the engine is closed"):
            call()
