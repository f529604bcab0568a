"""The engine on a GPU: graphs by default, the same tokens with and without them, steps prepared while others run."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attnplug.backend import AttentionBackend
from attnplug_transformers import Engine, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SLEEP_CYCLES = 400_000_000
"""More than 100 ms at any clock of a data centre's GPU."""
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    # Larger than the default, so that tokens differ from step to step, and the likeliest is likelier by far.
    "initializer_range": 0.2,
}
NEW = 40


def make_model(dtype: torch.dtype) -> Any:
    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval().to("cuda", dtype)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(torch.float32)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(1, 1024) for _ in range(n)] for n in (1, 150, 17, 64, 2, 33, 16)]


@pytest.fixture(scope="module")
def expected(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers' dense eager attention makes of each prompt alone, in float32."""
    one = copy.deepcopy(model)
    one.set_attn_implementation("eager")
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        out = one.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        found.append(out[0, len(prompt) :].tolist())
    assert len({token for tokens in found for token in tokens}) > 50, "an oracle that repeats itself proves little"
    return found


@pytest.fixture(params=["torch_native", "triton"])
def factory(request: pytest.FixtureRequest) -> type[AttentionBackend]:
    if request.param == "torch_native":
        from attnplug_torch_native.backend import TorchNativeBackend

        return TorchNativeBackend
    pytest.importorskip("attnplug_triton.backend", reason="attnplug-triton is not installed")
    from attnplug_triton.backend import TritonBackend

    return TritonBackend


def serve(model: Any, factory: type[AttentionBackend], **options: Any) -> Engine:
    options = {"num_pages": 400, "max_batch_size": 6, "chunk_size": 70, **options}
    return Engine(model, backend_factory=factory, **options)


def tokens_of(completions: Any) -> list[list[int]]:
    assert [one.error for one in completions] == [""] * len(completions)
    return [one.token_ids for one in completions]


@pytest.mark.parametrize("overlap", [False, True], ids=["one at a time", "overlap"])
@pytest.mark.parametrize("graphs", ["off", "auto"])
def test_tokens_in_float32_are_transformers_own(model, prompts, expected, factory, graphs, overlap) -> None:
    with serve(model, factory, graphs=graphs, overlap=overlap) as engine:
        lengths = [NEW, 11, NEW, 25, NEW, 3, NEW]
        got = tokens_of(engine.generate(prompts, lengths))
        assert got == [tokens[:n] for tokens, n in zip(expected, lengths)]
        assert (engine.graphs.num_replays > 30) is (graphs == "auto"), engine.graphs.facts()
        assert (engine._core.num_overlapped > 30) is overlap
        assert engine.pages.num_free == engine.pages.num_pages


def test_graphs_and_overlap_are_on_by_default(model, prompts, factory) -> None:
    with serve(model, factory) as engine:
        engine.generate(prompts[:3], 12)
        assert engine.graphs.refusal == ""
        assert engine.graphs.num_replays >= 8
        assert engine._core.num_overlapped >= 8


def test_few_pages_and_early_ends_give_the_same_tokens(model, prompts, expected, factory) -> None:
    ends = [tokens[9 + i] for i, tokens in enumerate(expected)]
    want = [tokens[: tokens.index(end) + 1] for tokens, end in zip(expected, ends)]
    sampling = [SamplingParams(stop_token_ids=(end,)) for end in ends]
    with serve(model, factory, page_size=16, num_pages=18, max_batch_size=4) as engine:
        assert tokens_of(engine.generate(prompts, NEW, sampling)) == want
        assert engine.pages.num_free == engine.pages.num_pages


def test_sampled_tokens_are_the_same_from_graphs(model, prompts, factory) -> None:
    sampling = SamplingParams(temperature=0.7, top_p=0.9, seed=3)
    found = []
    for graphs in ("off", "auto"):
        with serve(model, factory, graphs=graphs) as engine:
            found.append(tokens_of(engine.generate(prompts, 20, sampling)))
    assert found[0] == found[1]


@pytest.mark.parametrize("graphs", ["off", "auto"])
def test_a_step_is_prepared_and_given_while_the_one_before_runs(model, prompts, expected, factory, graphs) -> None:
    with serve(model, factory, graphs=graphs, max_batch_size=2, page_size=1) as engine:
        core = engine._core
        engine.generate(prompts[2:4], 4)
        ids = [engine.add_request(prompt, NEW) for prompt in prompts[2:4]]
        tokens: dict[int, list[int]] = {one: [] for one in ids}
        for _ in range(6):
            for output in engine.step():
                tokens[output.request_id] += output.token_ids
        given_early = []
        # The first time may allocate pinned memory, which waits for the device.
        for _ in range(2):
            torch.cuda._sleep(SLEEP_CYCLES)
            core._land_all()
            core._launch()
            before = core._flights[-1]
            core._launch()
            given_early.append(not before.is_done)
        assert given_early[-1], "the preparation of a step waited for the one before it"
        assert core.num_overlapped > 5
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id] += output.token_ids
        assert [tokens[one] for one in ids] == expected[2:4]


def test_giving_a_decode_step_to_the_device_never_synchronises(model, prompts, factory) -> None:
    with serve(model, factory, max_batch_size=3, page_size=1) as engine:
        engine.generate(prompts[2:5], 6)
        for prompt in prompts[2:5]:
            engine.add_request(prompt, NEW)
        for _ in range(4):
            engine.step()
        engine._core._land_all()
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine._core._launch()
            engine._core._launch()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        while engine.has_work:
            engine.step()


def test_bfloat16_tokens_keep_the_equality_rule(prompts, factory) -> None:
    model = make_model(torch.bfloat16)
    exact = copy.deepcopy(model).float()
    for graphs in ("off", "auto"):
        with serve(model, factory, graphs=graphs) as engine:
            got = tokens_of(engine.generate(prompts, NEW))
        for prompt, tokens in zip(prompts, got):
            ids = torch.tensor([[*prompt, *tokens]], device="cuda")
            rows = slice(len(prompt) - 1, -1)
            with torch.inference_mode():
                truth, rounded = exact(ids).logits[0, rows], model(ids).logits[0, rows].float()
            error = (rounded - truth).abs().max()
            chosen = truth.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)
            # Ours may be off by as much as transformers' own, and a token differs only between two that close.
            assert (truth.amax(-1) - chosen).max() <= 3 * error
