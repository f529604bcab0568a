"""Tokens/s of decoding a Llama-3.1-8B-shaped model with random weights: our Engine eager and from graphs, transformers.

    python benchmarks/graphs_gpu.py --json out.json [--seconds 140] [--revision TEXT]

Each way serves the same prompts in one process on one model. What is counted: tokens that came after every request had
its first one, by the host's clock as they came, so that neither prompts, nor captures, nor the making of pools are in
it. ``--device cpu --tiny`` runs the whole script on a small model.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.metadata
import json
import platform
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from _graph_ways import CONTEXT, PROMPT, Run, Way, ways
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
TINY = {**LLAMA_8B, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
BATCHES = (1, 8, 32)
CHECKED = 8
"""The batch whose tokens are compared and teacher-forced."""


def make_model(device: str, tiny: bool) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**(TINY if tiny else LLAMA_8B), bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with torch.device(device):
        model: Any = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    return model.eval()


def measure(way: Way, model: Any, prompts: list[list[int]], new: int) -> tuple[dict[str, Any], Run]:
    run, close = way.open(model, len(prompts))
    start = time.perf_counter()
    run(prompts, 4)
    warmed = time.perf_counter()
    made = run(prompts, new)
    seconds = time.perf_counter() - warmed
    rate, step = made.rate()
    facts = {
        "tokens_per_second": round(rate, 1),
        "median_step_ms": round(step, 3),
        "seconds_with_prompts": round(seconds, 3),
        "first_run_s": round(warmed - start, 3),
        **close(),
    }
    return facts, made


def force(model: Any, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return dense logits of the rows after which tokens were chosen, [n, new, vocabulary] float32."""
    ids = torch.tensor([[*prompt, *made] for prompt, made in zip(prompts, tokens)], device=model.device)
    rows = []
    with torch.inference_mode():
        for one in ids.split(2):
            logits = model(one, use_cache=False, logits_to_keep=len(tokens[0]) + 1).logits
            rows.append(logits[:, :-1].float())
    return torch.cat(rows)


def check(model: Any, prompts: list[list[int]], runs: dict[str, Run]) -> dict[str, Any]:
    """Hold tokens to the equality rule: a token may differ where the truth's best are closer than bfloat16's error."""
    exact = copy.deepcopy(model).float()
    found: dict[str, Any] = {}
    names = list(runs)
    for name in names:
        tokens = runs[name].tokens
        truth = force(exact, prompts, tokens)
        error = (force(model, prompts, tokens) - truth).abs().max().item()
        chosen = truth.gather(-1, torch.tensor(tokens, device=truth.device).unsqueeze(-1)).squeeze(-1)
        gap = truth.amax(-1) - chosen
        found[name] = {
            "prompts_with_the_tokens_of_the_first_way": sum(a == b for a, b in zip(tokens, runs[names[0]].tokens)),
            "tokens_not_the_truth_s_best": int((gap > 0).sum()),
            "largest_gap": round(gap.max().item(), 4),
            "bfloat16_error_of_dense_logits": round(error, 4),
            "within_the_rule": bool(gap.max().item() <= 2 * error),
        }
        del truth, chosen, gap
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=140, help="Start no further measurement after so long.")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--revision", default="")
    arguments = parser.parse_args()
    started = time.perf_counter()
    logging.set_verbosity_error()
    model = make_model(arguments.device, arguments.tiny)
    print(f"model after {time.perf_counter() - started:.1f} s", flush=True)
    rng, results, wrong = random.Random(1), dict[str, dict[str, Any]](), list[str]()
    checked: dict[str, Any] = {}
    for batch in BATCHES:
        prompts = [[rng.randrange(1, model.config.vocab_size) for _ in range(PROMPT)] for _ in range(batch)]
        table, runs = results.setdefault(str(batch), {}), dict[str, Run]()
        for way in ways(arguments.device):
            spent = time.perf_counter() - started
            if spent > arguments.seconds:
                table[way.name] = {"skipped": f"after {spent:.0f} s of {arguments.seconds:.0f}"}
                continue
            try:
                table[way.name], runs[way.name] = measure(way, model, prompts, arguments.new_tokens)
            except Exception as error:  # One way that fails is a result; the others go on.
                table[way.name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
                if way.name.startswith("attnplug"):
                    wrong.append(f"batch {batch}, {way.name}: {error}")
            print(batch, way.name, json.dumps(table[way.name]), flush=True)
            gc.collect()
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
        if batch == CHECKED:
            checked = check(model, prompts, runs)
            gc.collect()
            print("check", json.dumps(checked), flush=True)
    wrong += [
        f"{name}: tokens outside the equality rule"
        for name, one in checked.items()
        if name.startswith("attnplug") and not one["within_the_rule"]
    ]
    report = {
        "what": f"decoding by a Llama-3.1-8B-shaped model, random weights, bfloat16; prompts of {PROMPT} tokens, "
        f"{arguments.new_tokens} new ones, context limit {CONTEXT}",
        "tiny": arguments.tiny,
        "results_by_batch": results,
        f"check_at_batch_{CHECKED}": checked,
        "errors": wrong,
        "seconds": round(time.perf_counter() - started, 1),
        "card": card(arguments.device),
        "versions": versions(),
        "revision": arguments.revision or revision(),
    }
    arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["errors"]), f"{report['seconds']} s", flush=True)
    return 1 if wrong else 0


def card(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else platform.processor()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    for name in ("triton", "attnplug", "attnplug-transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed as a distribution"
    return found


def revision() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
