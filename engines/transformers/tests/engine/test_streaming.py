from __future__ import annotations

import pytest

from attnplug_transformers import SamplingParams
from attnplug_transformers.detokenize import TextStream


def feed(stream: TextStream, tokens, *, every: int = 1) -> list[str]:
    parts = []
    for at, token in enumerate(tokens):
        if stream.push(token):
            break
        if at % every == 0:
            parts.append(stream.take(final=False))
    stream.finish()
    return [*parts, stream.take(final=True)]


def test_no_part_of_a_character_is_ever_given(tokenizer):
    text = "naïve — 東京 🙂👩‍👧 end"
    parts = feed(TextStream(tokenizer), tokenizer.encode(text))
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts)
    assert len([part for part in parts if part]) == len(text), "each character comes when its last byte does"


def test_bytes_that_never_become_a_character_come_at_the_end(tokenizer):
    tokens = [*tokenizer.encode("ok"), *tokenizer.encode("é")[:1]]
    parts = feed(TextStream(tokenizer), tokens)
    assert "".join(parts[:-1]) == "ok"
    assert "".join(parts) == tokenizer.decode(tokens)


@pytest.mark.parametrize("every", [1, 3])
def test_the_beginning_of_a_stop_string_is_held_back(tokenizer, every):
    parts = feed(TextStream(tokenizer, ("###",)), tokenizer.encode("a # b ## c ###  d"), every=every)
    assert "".join(parts) == "a # b ## c "
    assert not any(part.endswith("#") for part in parts)


def test_what_only_began_like_a_stop_string_is_given_in_the_end(tokenizer):
    parts = feed(TextStream(tokenizer, ("stop",)), tokenizer.encode("non-sto"))
    assert parts[-1] == "sto"
    assert "".join(parts) == "non-sto"


def test_the_first_of_several_stop_strings_counts(tokenizer):
    assert "".join(feed(TextStream(tokenizer, ("xyz", "y")), tokenizer.encode("wxyz"))) == "wx"


def test_chunks_join_to_what_generate_gives(llama, prompts, tokenizer, serve):
    engine = serve(llama, tokenizer)
    whole = engine.generate(prompts, 24)
    assert all(one.text == tokenizer.decode(list(one.token_ids), skip_special_tokens=True) for one in whole)
    tokens = [[] for _ in prompts]
    texts, reasons = [""] * len(prompts), [None] * len(prompts)
    for chunk in engine.generate_stream(prompts, 24):
        tokens[chunk.index] += chunk.token_ids
        texts[chunk.index] += chunk.text
        reasons[chunk.index] = chunk.finish_reason
    assert tokens == [one.token_ids for one in whole]
    assert texts == [one.text for one in whole]
    assert reasons == [one.finish_reason for one in whole]


def test_a_text_prompt_is_encoded(llama, tokenizer, serve):
    engine = serve(llama, tokenizer)
    by_text, by_ids = engine.generate(["hello there", tokenizer.encode("hello there")], 8)
    assert by_text == by_ids


def test_a_stop_string_ends_a_completion(llama, tokenizer, prompts, serve):
    engine = serve(llama, tokenizer)
    (whole,) = engine.generate(prompts[3:4], 24)
    at = next(i for i in range(2, len(whole.text) - 1) if whole.text[i : i + 2].isascii())
    stop = whole.text[at : at + 2]
    (cut,) = engine.generate(prompts[3:4], 24, SamplingParams(stop=(stop,)))
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < len(whole.token_ids)


def test_stop_tokens_and_ignored_end_tokens(llama, prompts, expected, serve):
    engine = serve(llama)
    stop = expected[3][4]
    (cut,) = engine.generate(prompts[3:4], 24, SamplingParams(stop_token_ids=(stop,)))
    assert cut.token_ids == expected[3][: expected[3].index(stop) + 1]
    llama.model.generation_config.eos_token_id = stop
    try:
        (whole,) = serve(llama).generate(prompts[3:4], 24, SamplingParams(ignore_eos=True))
    finally:
        llama.model.generation_config.eos_token_id = 256
    assert whole.token_ids == expected[3]


def test_closing_a_stream_aborts_what_is_unfinished(llama, prompts, serve):
    engine = serve(llama)
    stream = engine.generate_stream(prompts, 24)
    next(stream)
    assert engine.pages.num_free < engine.pages.num_pages
    stream.close()
    assert engine.pages.num_free == engine.pages.num_pages
    engine.step()
    assert not engine.has_work


def test_a_stream_that_is_never_read_queues_nothing(llama, prompts, serve):
    engine = serve(llama)
    engine.generate_stream(prompts, 24)
    assert not engine.has_work
