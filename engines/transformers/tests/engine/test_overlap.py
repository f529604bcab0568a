"""A step prepared while the one before runs: the same outputs, in the same order, with nobody's token too many."""

from __future__ import annotations

import dataclasses

import pytest

from attnplug.modes import SharedReadEnds
from attnplug_torch_native.backend import TorchNativeBackend
from attnplug_transformers import SamplingParams


def tokens_of(completions):
    assert [one.error for one in completions] == [""] * len(completions)
    return [one.token_ids for one in completions]


def all_free(engine) -> bool:
    return engine.pages.num_free == engine.pages.num_pages and not engine.has_work


@pytest.mark.parametrize(
    "options", [{}, {"max_batch_size": 2, "chunk_size": 7}, {"page_size": 1, "num_pages": 190, "kv_cache_bytes": None}]
)
def test_tokens_are_the_same(llama, prompts, expected, serve, options):
    engine = serve(llama, overlap=True, **options)
    assert tokens_of(engine.generate(prompts, 24)) == expected
    assert engine._core.num_overlapped > 20
    assert all_free(engine)


def test_a_request_that_ends_early_gets_no_token_more(llama, prompts, expected, serve):
    ends = [want[4 + i] for i, want in enumerate(expected)]
    sampling = [SamplingParams(stop_token_ids=(end,)) for end in ends]
    want = [tokens[: tokens.index(end) + 1] for tokens, end in zip(expected, ends)]
    engine = serve(llama, overlap=True, max_batch_size=3)
    got = engine.generate(prompts, 24, sampling)
    assert tokens_of(got) == want
    assert {one.finish_reason for one in got} == {"stop"}
    assert all_free(engine)


def test_an_end_token_at_the_last_place_is_a_stop_and_not_a_length(llama, prompts, expected, serve):
    (got,) = serve(llama, overlap=True).generate(
        prompts[:1], expected[0].index(expected[0][5]) + 1, SamplingParams(stop_token_ids=(expected[0][5],))
    )
    assert got.finish_reason == "stop"


def test_stop_strings_and_streams_are_the_same(llama, prompts, expected, serve, tokenizer):
    def stream(**options):
        engine = serve(llama, tokenizer, **options)
        stop = SamplingParams(stop=(tokenizer.decode(expected[2][6:7]),))
        return [dataclasses.astuple(chunk) for chunk in engine.generate_stream(prompts[2:4], 12, stop)]

    def by_request(chunks):
        return [[chunk[1:] for chunk in chunks if chunk[0] == at] for at in (0, 1)]

    assert by_request(stream(overlap=True)) == by_request(stream())


@pytest.mark.parametrize("new", [2, 24], ids=["its last token on its way", "more to come"])
def test_an_aborted_request_ends_as_without_overlap(llama, prompts, expected, serve, new):
    outcomes = []
    for overlap in (False, True):
        engine = serve(llama, overlap=overlap)
        first, second = (engine.add_request(prompt, n) for prompt, n in zip(prompts[2:4], (new, 24)))
        tokens, reasons = {first: [], second: []}, {}
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
        assert engine.abort(first)
        assert not engine.abort(first)
        while engine.has_work:
            for output in engine.step():
                assert output.request_id not in reasons, "an output after the end"
                tokens[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    reasons[output.request_id] = output.finish_reason
        assert all_free(engine)
        outcomes.append((tokens, reasons))
    assert outcomes[0] == outcomes[1]
    assert outcomes[1] == ({first: expected[2][:1], second: expected[3]}, {first: "abort", second: "length"})


class Faulty(TorchNativeBackend):
    """Raises in the step that is told."""

    steps_left = 10**9

    def init_forward_metadata(self, batch):
        self.steps_left -= 1
        if self.steps_left < 0:
            self.steps_left = 10**9
            raise RuntimeError("a kernel failed")
        super().init_forward_metadata(batch)


def test_what_was_computed_before_a_step_that_raises_is_kept(llama, prompts, expected, serve):
    outcomes = []
    for overlap in (False, True):
        engine = serve(llama, backend_factory=Faulty, overlap=overlap)
        engine.backend.steps_left = 5
        ids = [engine.add_request(prompt, 24) for prompt in prompts[2:4]]
        tokens, ends = {one: [] for one in ids}, {}
        failures = 0
        while engine.has_work:
            try:
                outputs = engine.step()
            except RuntimeError:
                failures += 1
                continue
            for output in outputs:
                tokens[output.request_id] += output.token_ids
                ends[output.request_id] = (output.finish_reason, output.error)
        assert failures == 1
        assert all_free(engine)
        outcomes.append((list(tokens.values()), list(ends.values())))
        assert tokens_of(engine.generate(prompts[:2], 24)) == expected[:2], "the engine goes on"
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == [expected[2][:5], expected[3][:5]]
    assert outcomes[0][1][0] == ("error", "the step failed: RuntimeError: a kernel failed")


def test_one_request_without_pages_fails_alone(llama, prompts, expected, serve):
    engine = serve(llama, page_size=16, num_pages=10, kv_cache_bytes=None, overlap=True)
    got = engine.generate([prompts[1], prompts[2], prompts[5]], [24, 24, 24])
    assert [one.token_ids for one in got[1:]] == [expected[2], expected[5]]
    assert got[0].finish_reason == "error"
    assert got[0].token_ids == expected[1][: 160 - 150 + 1], "what was made before is kept"
    assert all_free(engine)


def test_a_step_is_given_before_the_tokens_of_the_one_before_are_read(llama, prompts, serve, monkeypatch):
    from attnplug_transformers.flight import Flight

    events = []
    engine = serve(llama, overlap=True)
    forward, tokens = engine._core._forward, Flight.tokens
    monkeypatch.setattr(engine._core, "_forward", lambda *args: (events.append("give"), forward(*args))[1])
    monkeypatch.setattr(Flight, "tokens", lambda self: (events.append("read"), tokens(self))[1])
    engine.generate(prompts[2:4], 4)
    assert events == ["give", "give", "read", "give", "read", "give", "read", "read"]


def test_without_a_gpu_or_a_known_read_end_steps_run_one_at_a_time_by_default(llama, prompts, serve):
    import torch

    from attnplug_transformers.overlap import read_end_fence

    class Unaudited(TorchNativeBackend):
        def shared_read_ends(self, mode):
            return SharedReadEnds.UNKNOWN

    engine = serve(llama)
    engine.generate(prompts[:2], 4)
    assert engine._core.num_overlapped == 0
    unknown = serve(llama, backend_factory=Unaudited)
    assert read_end_fence(unknown.backend, torch.device("cuda"), None) is None
    assert read_end_fence(unknown.backend, torch.device("cpu"), True) is not None
    assert read_end_fence(engine.backend, torch.device("cpu"), None) is None
