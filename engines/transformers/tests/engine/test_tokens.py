"""Tokens are those of transformers' own eager attention, whatever the engine's sizes are."""

from __future__ import annotations

import pytest

from attnplug.wrappers.hybrid import HybridAttnBackend
from attnplug_torch_native.backend import TorchNativeBackend


def tokens_of(completions):
    assert [one.error for one in completions] == [""] * len(completions)
    return [one.token_ids for one in completions]


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_tokens_do_not_depend_on_the_page_size(llama, prompts, expected, serve, page_size):
    assert tokens_of(serve(llama, page_size=page_size).generate(prompts, 24)) == expected


@pytest.mark.parametrize(("chunk_size", "max_num_tokens"), [(1, 2048), (7, 64), (64, 64), (None, 9)])
def test_tokens_do_not_depend_on_how_prompts_are_cut(llama, prompts, expected, serve, chunk_size, max_num_tokens):
    engine = serve(llama, page_size=16, chunk_size=chunk_size, max_num_tokens=max_num_tokens, max_batch_size=8)
    assert tokens_of(engine.generate(prompts, 24)) == expected


@pytest.mark.parametrize("max_batch_size", [1, 2, 5])
def test_tokens_do_not_depend_on_the_batch(llama, prompts, expected, serve, max_batch_size):
    engine = serve(llama, page_size=16, max_batch_size=max_batch_size, chunk_size=40)
    assert tokens_of(engine.generate(prompts, 24)) == expected


@pytest.mark.parametrize("page_size", [1, 16])
def test_qwen3_gives_the_same_tokens(qwen3, prompts, serve, page_size):
    want = [qwen3.greedy(prompt, 12) for prompt in prompts]
    assert tokens_of(serve(qwen3, page_size=page_size, chunk_size=50).generate(prompts, 12)) == want


def test_two_backends_give_the_same_tokens(llama, prompts, expected, serve):
    def pair(env):
        return HybridAttnBackend(TorchNativeBackend(env), TorchNativeBackend(env))

    engine = serve(llama, backend_factory=pair, chunk_size=40)
    assert tokens_of(engine.generate(prompts, 24)) == expected


def test_a_backend_without_mixed_steps_takes_turns(llama, prompts, expected, serve):
    modes = []

    class Unmixed(TorchNativeBackend):
        def __init__(self, env):
            super().__init__(env)
            self.spec = self.spec.replace(modes=self.spec.modes - {"mixed"})

        def init_forward_metadata(self, batch):
            modes.append(batch.forward_mode.value)
            super().init_forward_metadata(batch)

    engine = serve(llama, backend_factory=Unmixed, chunk_size=40)
    assert tokens_of(engine.generate(prompts, 24)) == expected
    assert set(modes) == {"extend", "decode"}
    first_decode = modes.index("decode")
    assert modes[first_decode + 1] == "extend", "a prompt's next chunk waits for one decode step, not for all"


def test_new_requests_join_while_others_run(llama, prompts, expected, serve):
    engine = serve(llama, page_size=16)
    tokens = {}
    waiting = list(prompts)
    ids = []
    while waiting or engine.has_work:
        if waiting:
            ids.append(engine.add_request(waiting.pop(0), 24))
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert [tokens[request_id] for request_id in ids] == expected


def test_an_engine_serves_call_after_call(llama, prompts, expected, serve):
    engine = serve(llama, page_size=16)
    for prompt, want in zip(prompts, expected):
        assert tokens_of(engine.generate([prompt], 24)) == [want]
    assert engine.pages.num_free == engine.pages.num_pages


def test_each_prompt_has_its_own_limit(llama, prompts, expected, serve):
    lengths = [1, 24, 3, 2, 5, 7, 11]
    got = serve(llama).generate(prompts, lengths)
    assert tokens_of(got) == [want[:n] for want, n in zip(expected, lengths)]
    assert {one.finish_reason for one in got} == {"length"}


def test_an_end_token_ends_a_completion_and_is_part_of_it(llama, prompts, expected, serve):
    end = expected[0][5]
    model = llama.model
    model.generation_config.eos_token_id = [end, 256]
    try:
        (got,) = serve(llama).generate(prompts[:1], 24)
    finally:
        model.generation_config.eos_token_id = 256
    assert got.token_ids == expected[0][: expected[0].index(end) + 1]
    assert got.finish_reason == "stop"


def test_the_end_of_the_context_ends_a_completion(llama, prompts, expected, serve):
    (got,) = serve(llama, max_context_len=160).generate([prompts[1]], 24)
    assert got.token_ids == expected[1][:10]
    assert got.finish_reason == "length"
