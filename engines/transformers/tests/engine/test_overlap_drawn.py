"""Drawn workloads, sizes and pools: with overlap and graphs every request ends as without, token by token."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attnplug_torch_native.backend import TorchNativeBackend
from attnplug_transformers import Engine, SamplingParams

VOCABULARY, LAST_ARRIVAL = 97, 25


class Unmixed(TorchNativeBackend):
    def __init__(self, env):
        super().__init__(env)
        self.spec = self.spec.replace(modes=self.spec.modes - {"mixed"})


class Outcome(NamedTuple):
    tokens: dict[int, list[int]]
    ends: dict[int, tuple[str, str]]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=5,
        initializer_range=0.4,
    )
    # float64, so that the batch that a request is in changes no token.
    return LlamaForCausalLM(config).double().eval()


def drive(model, seed: int, **options) -> tuple[Outcome, Engine]:
    rng = random.Random(seed)
    page = rng.choice([1, 4, 16])
    engine = Engine(
        model,
        backend_factory=TorchNativeBackend if seed % 3 else Unmixed,
        page_size=page,
        # Few enough that requests give way, and that some run out alone.
        num_pages=rng.randint(-(-48 // page), -(-90 // page)),
        max_batch_size=rng.randint(1, 5),
        chunk_size=rng.choice([1, 7, 64]),
        max_num_tokens=64,
        max_context_len=rng.choice([64, 128]),
        check_batches=True,
        **options,
    )
    arrivals: dict[int, list[tuple[list[int], int, SamplingParams]]] = {}
    for i in range(rng.randint(1, 9)):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 40))]
        sampling = SamplingParams(
            temperature=rng.choice([0, 0, 0.8]), seed=i, stop_token_ids=(rng.randrange(VOCABULARY),)
        )
        arrivals.setdefault(rng.randrange(LAST_ARRIVAL), []).append((prompt, rng.randint(1, 40), sampling))
    outcome, step = Outcome({}, {}), 0
    while step <= LAST_ARRIVAL or engine.has_work:
        for request in arrivals.get(step, ()):
            engine.add_request(*request)
        for output in engine.step():
            assert output.request_id not in outcome.ends, "an output after the end"
            outcome.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                outcome.ends[output.request_id] = (output.finish_reason, output.error)
        step += 1
        assert step < 3000, "no progress"
    assert engine.pages.num_free == engine.pages.num_pages
    assert engine.scheduler.table.num_free_rows == engine.sizes.max_batch_size
    return outcome, engine


def test_drawn_workloads_end_as_without_overlap_and_graphs(model):
    preemptions, reasons, replays = 0, set(), 0
    for seed in range(28):
        want, _ = drive(model, seed, overlap=False)
        got, engine = drive(model, seed, overlap=True, graphs="emulated" if seed % 2 else "off")
        assert got == want, f"seed {seed}"
        preemptions += engine.scheduler.num_preemptions
        replays += engine.graphs.num_replays
        reasons |= {reason for reason, _ in want.ends.values()}
    assert preemptions > 3
    assert replays > 50
    assert reasons == {"stop", "length", "error"}
