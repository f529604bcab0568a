"""Too few pages: requests give way and come back, and no page is ever lost."""

from __future__ import annotations

import pytest

from attnplug_torch_native.backend import TorchNativeBackend


def all_free(engine) -> bool:
    return engine.pages.num_free == engine.pages.num_pages and not engine.has_work


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 190), (16, 12)])
@pytest.mark.parametrize("chunk_size", [13, None])
def test_a_preempted_request_ends_with_the_same_tokens(
    llama, prompts, expected, serve, page_size, num_pages, chunk_size
):
    engine = serve(llama, page_size=page_size, num_pages=num_pages, kv_cache_bytes=None, chunk_size=chunk_size)
    some = [0, 2, 3, 4, 5, 6, 1]
    got = engine.generate([prompts[i] for i in some], 24)
    assert [one.token_ids for one in got] == [expected[i] for i in some]
    assert engine.scheduler.num_preemptions > 0
    assert all_free(engine)


def test_one_request_without_pages_fails_alone(llama, prompts, expected, serve):
    engine = serve(llama, page_size=16, num_pages=10, kv_cache_bytes=None)
    got = engine.generate([prompts[1], prompts[2], prompts[5]], [24, 24, 24])
    assert [one.token_ids for one in got[1:]] == [expected[2], expected[5]]
    assert got[0].finish_reason == "error"
    assert "10 pages" in got[0].error
    assert "num_pages" in got[0].error
    assert got[0].token_ids == expected[1][: 160 - 150 + 1], "what was made before is kept"
    assert all_free(engine)


class Faulty(TorchNativeBackend):
    """Raises in a layer of the steps that are told."""

    faults: list[BaseException]

    def forward_extend(self, *args, **kwargs):
        layer = args[3]
        if self.faults and layer.layer_id == 1:
            raise self.faults.pop()
        return super().forward_extend(*args, **kwargs)


@pytest.mark.parametrize("error", [RuntimeError("a kernel failed"), KeyboardInterrupt()])
def test_a_step_that_raises_leaves_a_usable_engine(llama, prompts, expected, serve, error):
    engine = serve(llama, backend_factory=Faulty)
    engine.backend.faults = [error]
    before = llama.model.config._attn_implementation
    with pytest.raises(type(error)):
        engine.generate(prompts, 24)
    assert llama.model.config._attn_implementation == before
    engine.step()
    assert all_free(engine)
    assert [one.token_ids for one in engine.generate(prompts, 24)] == expected


def test_only_the_requests_of_the_failed_step_fail(llama, prompts, expected, serve):
    engine = serve(llama, backend_factory=Faulty, max_batch_size=2)
    engine.backend.faults = []
    ids = [engine.add_request(prompt, 24) for prompt in prompts[2:5]]
    engine.step()
    engine.backend.faults = [RuntimeError("a kernel failed")]
    with pytest.raises(RuntimeError, match="a kernel failed"):
        engine.step()
    ended, tokens = {}, []
    while engine.has_work:
        for output in engine.step():
            if output.request_id == ids[2]:
                tokens += output.token_ids
            if output.finish_reason:
                ended[output.request_id] = (output.finish_reason, output.error)
    assert ended[ids[0]] == ended[ids[1]] == ("error", "the step failed: RuntimeError: a kernel failed")
    assert ended[ids[2]] == ("length", "")
    assert tokens == expected[4]


def test_aborted_requests_give_back_their_pages(llama, prompts, serve):
    engine = serve(llama, max_batch_size=2)
    ids = [engine.add_request(prompt, 24) for prompt in prompts[:4]]
    engine.step()
    assert engine.abort(ids[0])
    assert engine.abort(ids[3])
    assert not engine.abort(ids[3]), "it has ended"
    assert not engine.abort(12345)
    reasons = {}
    while engine.has_work:
        reasons |= {output.request_id: output.finish_reason for output in engine.step()}
    assert reasons == {ids[0]: "abort", ids[1]: "length", ids[2]: "length", ids[3]: "abort"}
    assert all_free(engine)
