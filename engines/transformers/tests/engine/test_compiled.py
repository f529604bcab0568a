"""A model that its owner compiled is served as one that is not: the attention calls are opaque operations in it."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

from attnplug_transformers import Engine

NATIVE = {"attention": {"prefill": "torch_native", "decode": "torch_native"}}


@pytest.mark.slow
def test_a_compiled_llama_gives_the_same_tokens_through_the_engine(llama, prompts, expected, serve):
    import copy

    model = copy.deepcopy(llama.model)
    torch._dynamo.reset()
    compiler = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model.compile(backend=compiler, dynamic=True)
    try:
        engine = Engine(model, attention=NATIVE, kv_cache_bytes=64 << 20, check_batches=True)
        got = engine.generate([prompts[2], prompts[6]], 12)
    finally:
        torch._dynamo.reset()
    assert [one.token_ids for one in got] == [expected[2][:12], expected[6][:12]]
    calls = [node.target for graph in compiler.graphs for node in graph.graph.nodes if "attnplug" in str(node.target)]
    assert {str(call) for call in calls} == {"attnplug.attention"}, "every layer's call was compiled, as an operation"
    # Once for a step's prompts and once for its decode rows, not once a step.
    assert compiler.frame_count <= 40
