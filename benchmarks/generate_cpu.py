"""Eight prompts by SmolLM2-135M on a CPU: our Engine beside transformers' own ``generate_batch`` (paged|sdpa).

Both start from a loaded model and pay for their own pools; runs are interleaved. Run: python
benchmarks/generate_cpu.py [--repeats 5] [--threads 2]; writes benchmarks/results/generate_cpu.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import _report
import torch
from transformers import GenerationConfig
from transformers.utils import logging

from attnplug_transformers import Engine
from attnplug_transformers.loading import load_model

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Explain in one sentence why the sky is blue.",
    "Write a two-line poem about the sea.",
    "Name three uses of a paper clip.",
    "How do bees make honey?",
    "Tell me a short story about a lighthouse keeper who finds a message in a bottle on a stormy night.",
    "What should I pack for a week of walking in the mountains in early autumn, if it may rain?",
    "Hi!",
)
NATIVE = {"attention": {"prefill": "torch_native", "decode": "torch_native"}}
PAGE_SIZE = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    load = os.getloadavg()[0]
    results = {
        dtype: compare(dtype, repeats=arguments.repeats, max_new_tokens=arguments.max_new_tokens)
        for dtype in ("float32", "bfloat16")
    }
    _report.write(
        "generate_cpu",
        {
            "what": "8 chat prompts by SmolLM2-135M-Instruct, greedy, until every one has max_new_tokens",
            "max_new_tokens": arguments.max_new_tokens,
            "threads": arguments.threads,
            "page_size": PAGE_SIZE,
            "results": results,
            "load_average_before_and_after": [round(load, 2), round(os.getloadavg()[0], 2)],
        },
        ("attnplug", "attnplug-torch-native", "attnplug-transformers", "torch", "transformers"),
    )
    return 0 if results["float32"]["speed_over_transformers"] >= 1 else 1


def compare(dtype: str, *, repeats: int, max_new_tokens: int) -> dict[str, Any]:
    """Time both, in turn; raises where either failed or, in float32, gave other tokens."""
    loaded = load_model("smollm2", dtype=dtype)
    tokenizer: Any = loaded.tokenizer
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True, return_dict=False)
        for p in PROMPTS
    ]
    # No end token, so that both do the same work.
    loaded.model.generation_config.eos_token_id = None
    loaded.model.config.eos_token_id = None
    ways: dict[str, Callable[[], list[list[int]]]] = {
        "attnplug": lambda: ours(loaded.model, prompts, max_new_tokens),
        "transformers": lambda: theirs(loaded.model, prompts, max_new_tokens),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    tokens: dict[str, list[list[int]]] = {}
    for _ in range(repeats + 1):
        for name, generate in ways.items():
            start, busy = time.perf_counter(), time.process_time()
            tokens[name] = generate()
            times[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - busy)
    same = sum(a == b for a, b in zip(tokens["attnplug"], tokens["transformers"]))
    if dtype == "float32" and same != len(prompts):
        raise AssertionError(f"only {same} of {len(prompts)} prompts have the same tokens")
    # The first of each warms up.
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    count = len(prompts) * max_new_tokens
    return {
        "median_s": {name: round(value, 3) for name, value in medians.items()},
        # Wall time grows with what else the machine does; this says how much of it that was.
        "cpu_median_s": {name: round(statistics.median(values[1:]), 3) for name, values in cpu.items()},
        "spread_s": {name: [round(min(values[1:]), 3), round(max(values[1:]), 3)] for name, values in times.items()},
        "tokens_per_second": {name: round(count / value, 1) for name, value in medians.items()},
        "speed_over_transformers": round(medians["transformers"] / medians["attnplug"], 3),
        "prompts_with_the_same_tokens": same,
    }


def ours(model: Any, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    with Engine(
        model, attention=NATIVE, page_size=PAGE_SIZE, max_batch_size=len(prompts), max_context_len=512
    ) as engine:
        completions = engine.generate(prompts, max_new_tokens)
    return [list(one.token_ids) for one in completions]


def theirs(model: Any, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    from transformers import ContinuousBatchingConfig

    before = model.config._attn_implementation
    model.set_attn_implementation("paged|sdpa")
    try:
        outputs = model.generate_batch(
            inputs=prompts,
            generation_config=GenerationConfig(
                max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            # The pool that ours has; without a GPU its own choice of sizes has nothing to go by.
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_SIZE, num_blocks=len(prompts) * 512 // PAGE_SIZE, max_batch_tokens=2048
            ),
        )
    finally:
        model.set_attn_implementation(before)
    # generate_batch reports failures here and nowhere else.
    failed = [out.error for out in outputs.values() if out.error is not None]
    if failed or len(outputs) != len(prompts):
        raise RuntimeError(f"generate_batch failed: {failed or 'outputs are missing'}")
    return [list(out.generated_tokens) for out in outputs.values()]


if __name__ == "__main__":
    sys.exit(main())
