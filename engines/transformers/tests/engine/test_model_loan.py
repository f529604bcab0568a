"""A served model stays its owner's."""

from __future__ import annotations

import threading

import pytest
import torch

from attnplug.errors import ContractViolation, UnsupportedModel
from attnplug_torch_native.backend import TorchNativeBackend
from attnplug_transformers.sites import make_layers


def test_the_model_computes_as_before_between_steps(llama, prompts, serve):
    ids = torch.tensor([prompts[3]])
    with torch.no_grad():
        before = llama.model(ids).logits
        engine = serve(llama)
        engine.add_request(prompts[2], 8)
        engine.step()
        assert torch.equal(llama.model(ids).logits, before)
        assert llama.model.config._attn_implementation == "sdpa"
        engine.close()


def test_two_engines_share_a_model(llama, prompts, expected, serve):
    one, other = serve(llama, page_size=16), serve(llama, page_size=64)
    streams = [engine.generate_stream(prompts[:3], 24) for engine in (one, other)]
    got = [{0: [], 1: [], 2: []} for _ in streams]
    for parts in zip(*streams, strict=True):
        for tokens, chunk in zip(got, parts):
            tokens[chunk.index] += chunk.token_ids
    assert [[tokens[i] for i in range(3)] for tokens in got] == [expected[:3]] * 2


def test_threads_take_turns_and_each_gets_its_own(llama, prompts, expected, serve):
    engine = serve(llama, page_size=16)
    got: dict[int, list[int]] = {}

    def ask(at: int) -> None:
        got[at] = engine.generate([prompts[at]], 24)[0].token_ids

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [got[at] for at in range(len(prompts))] == expected
    assert engine.pages.num_free == engine.pages.num_pages


def test_another_thread_is_told_that_the_model_is_in_a_step(llama, prompts, serve):
    caught: list[BaseException] = []

    class Intruded(TorchNativeBackend):
        def forward_extend(self, *args, **kwargs):
            if not caught:

                def call() -> None:
                    try:
                        llama.model(torch.tensor([prompts[2]]))
                    except ContractViolation as error:
                        caught.append(error)

                thread = threading.Thread(target=call)
                thread.start()
                thread.join(timeout=30)
            return super().forward_extend(*args, **kwargs)

    serve(llama, backend_factory=Intruded).generate(prompts[:1], 2)
    assert "in another thread" in str(caught[0])


@pytest.mark.parametrize(
    ("attribute", "value", "name"),
    [("scaling", 0.5, "scaling"), ("head_dim", 4, "head_dim"), ("sliding_window", 9, "sliding_window_size")],
)
def test_a_module_that_differs_from_its_spec_is_refused(llama, serve, monkeypatch, attribute, value, name):
    attention = llama.model.model.layers[1].self_attn
    monkeypatch.setattr(attention, attribute, value, raising=False)
    with pytest.raises(UnsupportedModel, match=f"layer 1: {name} is .* in the model, .* in its ModelSpec"):
        serve(llama)


def test_a_call_that_differs_from_its_spec_is_refused(llama, prompts, serve, monkeypatch):
    engine = serve(llama)
    monkeypatch.setattr(llama.model.model.layers[2].self_attn, "scaling", 0.25)
    with pytest.raises(UnsupportedModel, match=r"layer 2 .*\n.*scaling: the call has 0.25"):
        engine.generate(prompts[:1], 2)


def test_a_model_with_other_layers_than_its_spec_is_refused(llama, serve):
    spec = serve(llama).model_spec
    with pytest.raises(UnsupportedModel, match=r"layers \[0, 1, 2\] of the model, in \[0, 1\]"):
        make_layers(llama.model, spec.subset([0, 1]))
