"""Latent attention gives the tokens of transformers' dense eager attention, in every form and at every size."""

from __future__ import annotations

import pytest
from mla_world import FORMS, MODELS, NATIVE, NEW_TOKENS, Recorder, expanding, tokens_of

from attnplug.modes import ForwardMode, MlaForm
from attnplug.spec import Feature
from attnplug_transformers import Engine

EXTEND, DECODE, MIXED = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED
ABSORBED, ONE_SHOT, CHUNKED = MlaForm.ABSORBED, MlaForm.ONE_SHOT, MlaForm.CHUNKED_PREFIX


@pytest.mark.parametrize("name", MODELS)
def test_each_architecture_gives_transformers_tokens(case, serve, name):
    one = case(name)
    assert len({token for tokens in one.expected for token in tokens}) > 20, "tokens that say nothing prove nothing"
    engine = serve(one.oracle.model, page_size=16, max_num_tokens=48)
    assert tokens_of(engine.generate(one.prompts, NEW_TOKENS)) == one.expected


def test_a_saved_checkpoint_is_loaded_and_served(v3, tmp_path):
    v3.oracle.copy.save_pretrained(tmp_path)
    with Engine.from_pretrained(tmp_path, attention=NATIVE, device="cpu", kv_cache_bytes=16 << 20) as engine:
        assert tokens_of(engine.generate(v3.prompts[:4], NEW_TOKENS)) == v3.expected[:4]
        assert engine.decision.decode == "torch_native"


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_tokens_do_not_depend_on_the_page_size(deepseek, serve, page_size):
    engine = serve(deepseek.oracle.model, page_size=page_size, chunk_size=50)
    assert tokens_of(engine.generate(deepseek.prompts, NEW_TOKENS)) == deepseek.expected


@pytest.mark.parametrize(("chunk_size", "max_num_tokens"), [(1, 2048), (7, 16), (64, 64), (None, 9)])
def test_tokens_do_not_depend_on_how_prompts_are_cut(deepseek, serve, chunk_size, max_num_tokens):
    engine = serve(
        deepseek.oracle.model, page_size=16, chunk_size=chunk_size, max_num_tokens=max_num_tokens, max_batch_size=8
    )
    assert tokens_of(engine.generate(deepseek.prompts, NEW_TOKENS)) == deepseek.expected


@pytest.mark.parametrize("max_batch_size", [1, 2, 5])
def test_tokens_do_not_depend_on_the_batch(deepseek, serve, max_batch_size):
    engine = serve(deepseek.oracle.model, page_size=16, max_batch_size=max_batch_size, chunk_size=40)
    assert tokens_of(engine.generate(deepseek.prompts, NEW_TOKENS)) == deepseek.expected


def test_preempted_requests_end_with_the_same_tokens(deepseek, serve):
    engine = serve(deepseek.oracle.model, page_size=1, num_pages=190, chunk_size=40)
    assert tokens_of(engine.generate(deepseek.prompts, NEW_TOKENS)) == deepseek.expected
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    ("without", "expected"),
    [
        pytest.param(
            frozenset(),
            {(EXTEND, ONE_SHOT), (EXTEND, CHUNKED), (EXTEND, ABSORBED), (DECODE, ABSORBED)},
            id="every form",
        ),
        pytest.param(
            FORMS - {Feature.MLA_ABSORBED},
            {(EXTEND, ABSORBED), (MIXED, ABSORBED), (DECODE, ABSORBED)},
            id="absorbed alone",
        ),
        pytest.param(
            frozenset({Feature.MLA_CHUNKED_PREFIX}),
            {(EXTEND, ONE_SHOT), (EXTEND, ABSORBED), (DECODE, ABSORBED)},
            id="prefixes absorbed",
        ),
        pytest.param(
            frozenset({Feature.LSE}),
            {(EXTEND, ONE_SHOT), (EXTEND, ABSORBED), (DECODE, ABSORBED)},
            id="nothing merged",
        ),
    ],
)
def test_a_step_is_computed_in_the_form_that_the_backend_declares(deepseek, serve, without, expected):
    calls = []
    engine = serve(
        deepseek.oracle.model,
        backend_factory=lambda env: Recorder(env, calls, without),
        chunk_size=40,
        max_num_tokens=64,
    )
    assert tokens_of(engine.generate(deepseek.prompts, NEW_TOKENS)) == deepseek.expected
    assert {(call.mode, call.form) for call in calls} == expected


@pytest.mark.parametrize("page_size", [1, 64])
def test_an_expanding_prefill_backend_joins_an_absorbing_decode_backend(deepseek, serve, page_size):
    prefill, decode = [], []
    pair = expanding(prefill, decode)
    attention = {"attention": {"page_size": page_size}}
    engine = serve(deepseek.oracle.model, backend_factory=pair, attention=attention, chunk_size=40, max_num_tokens=64)
    assert tokens_of(engine.generate(deepseek.prompts, NEW_TOKENS)) == deepseek.expected
    assert {call.form for call in prefill} == {ONE_SHOT, CHUNKED}
    assert {(call.mode, call.form) for call in decode} == {(DECODE, ABSORBED)}


def test_a_long_prefix_is_expanded_in_bounded_chunks(v3, serve):
    calls = []
    engine = serve(v3.oracle.model, backend_factory=expanding(calls), max_num_tokens=20, max_batch_size=4)
    assert tokens_of(engine.generate(v3.prompts[1:2], NEW_TOKENS)) == v3.expected[1:2]
    chunks = [call.chunk for call in calls if call.form is CHUNKED]
    assert max(sum(chunk) for chunk in chunks) == 20
    # 150 tokens in steps of 20: before step i lie 20·i, read 20 at a time.
    assert len(chunks) == sum(range(8))


def test_one_chunk_holds_the_prefixes_of_several_requests(v3, serve):
    calls = []
    engine = serve(v3.oracle.model, backend_factory=expanding(calls), chunk_size=30, max_num_tokens=64)
    ids = [engine.add_request(prompt, NEW_TOKENS) for prompt in (v3.prompts[3], v3.prompts[5], v3.prompts[1])]
    got: dict[int, list[int]] = {request_id: [] for request_id in ids}
    while engine.has_work:
        for output in engine.step():
            got[output.request_id].extend(output.token_ids)
    assert [got[i] for i in ids] == [v3.expected[3], v3.expected[5], v3.expected[1]]
    assert any(len(call.chunk) > 1 and 0 in call.chunk for call in calls if call.form is CHUNKED)


def test_a_few_rows_do_not_expand_a_prefix_and_many_do(v3, serve):
    """Of widths C 16, R 8, nope 12 and Dv 10, an expansion of a key pays from 36 queries on."""
    for chunk_size, form in ((35, ABSORBED), (36, CHUNKED)):
        calls = []
        engine = serve(
            v3.oracle.model, backend_factory=lambda env, calls=calls: Recorder(env, calls), chunk_size=chunk_size
        )
        engine.generate([v3.prompts[1][: 2 * chunk_size]], 1)
        assert calls[-1].form is form
