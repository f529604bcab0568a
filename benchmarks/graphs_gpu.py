"""Tokens/s of decoding a Llama-3.1-8B-shaped model with random weights: our Engine eager and from graphs, transformers.

    python benchmarks/graphs_gpu.py --json out.json [--seconds 140] [--revision TEXT]

Each way serves the same prompts in one process on one model. What is counted: tokens that came after every request had
its first one, by the host's clock as they came, so that neither prompts, nor captures, nor the making of pools are in
it. ``--device cpu --tiny`` runs the whole script on a small model.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import importlib.metadata
import itertools
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from attnplug_torch_native.backend import TorchNativeBackend
from attnplug_transformers import Engine

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
PROMPT, CONTEXT, PAGE = 128, 512, 16
CHECKED = 8
"""The batch whose tokens are compared and teacher-forced."""


class Run(NamedTuple):
    """What a way made of the prompts, and when each token came."""

    tokens: list[list[int]]
    times: list[list[float]]

    def rate(self) -> tuple[float, float]:
        """Return (tokens/s, median ms a step) from the last first token on."""
        start, end = max(times[0] for times in self.times), max(times[-1] for times in self.times)
        count = sum(t > start for times in self.times for t in times)
        steps = sorted({t for times in self.times for t in times if t >= start})
        gaps = [1e3 * (b - a) for a, b in itertools.pairwise(steps)]
        # Tokens of one step may bear times that differ by microseconds.
        return count / (end - start), statistics.median([gap for gap in gaps if gap > 0.05] or [0.0])


class Way(NamedTuple):
    """A way to serve: opened for a batch size, it gives what runs prompts."""

    name: str
    open: Callable[[Any, int], tuple[Callable[[list[list[int]], int], Run], Callable[[], dict[str, Any]]]]


def ours(name: str, factory: Any, **options: Any) -> Way:
    def open_(model: Any, batch: int) -> Any:
        engine = Engine(
            model,
            backend_factory=factory,
            page_size=None,
            max_batch_size=batch,
            max_num_tokens=max(2048, batch * PROMPT),
            max_context_len=CONTEXT,
            num_pages=batch * CONTEXT // PAGE + batch,
            **options,
        )

        def run(prompts: list[list[int]], new: int) -> Run:
            ids = [engine.add_request(prompt, new, stream=False) for prompt in prompts]
            tokens: dict[int, list[int]] = {one: [] for one in ids}
            times: dict[int, list[float]] = {one: [] for one in ids}
            while engine.has_work:
                outputs, now = engine.step(), time.perf_counter()
                for output in outputs:
                    if output.error:
                        raise RuntimeError(output.error)
                    tokens[output.request_id] += output.token_ids
                    times[output.request_id] += [now] * len(output.token_ids)
            return Run(list(tokens.values()), list(times.values()))

        def close() -> dict[str, Any]:
            facts = {"graphs": engine.graphs.facts(), "overlapped_steps": engine._core.num_overlapped}
            engine.close()
            return facts

        return run, close

    return Way(name, open_)


def theirs(name: str, use_cuda_graph: bool) -> Way:
    def open_(model: Any, batch: int) -> Any:
        names = {one.name for one in dataclasses.fields(ContinuousBatchingConfig)}
        page = 32
        sizes = {
            "page_size" if "page_size" in names else "block_size": page,
            "num_blocks": 2 * batch * CONTEXT // page,
            "max_batch_tokens": max(2048, batch * PROMPT),
            "use_cuda_graph": use_cuda_graph,
        }

        def run(prompts: list[list[int]], new: int) -> Run:
            before = model.config._attn_implementation
            model.set_attn_implementation("paged|sdpa")
            try:
                outputs = model.generate_batch(
                    inputs=prompts,
                    generation_config=GenerationConfig(
                        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
                    ),
                    continuous_batching_config=ContinuousBatchingConfig(**sizes),
                    record_timestamps=True,
                )
            finally:
                model.set_attn_implementation(before)
            found = list(outputs.values())
            failed = [str(out.error) for out in found if out.error is not None]
            if failed or len(found) != len(prompts):
                raise RuntimeError(f"generate_batch failed: {failed or 'outputs are missing'}")
            by_prompt = {tuple(out.prompt_ids): out for out in found}
            ordered = [by_prompt[tuple(prompt)] for prompt in prompts]
            return Run([list(one.generated_tokens) for one in ordered], [list(one.timestamps) for one in ordered])

        return run, dict

    return Way(name, open_)


def ways(device: str) -> list[Way]:
    graphs = "auto" if device == "cuda" else "emulated"
    found = []
    for name, factory in backends(device):
        found += [
            ours(f"attnplug {name} eager", factory, graphs="off", overlap=False),
            ours(f"attnplug {name} graphs", factory, graphs=graphs, overlap=False),
            ours(f"attnplug {name} graphs, overlap", factory, graphs=graphs, overlap=True),
        ]
    found.append(theirs("transformers generate_batch paged|sdpa", use_cuda_graph=False))
    if device == "cuda":
        found.append(theirs("transformers generate_batch paged|sdpa, its graphs", use_cuda_graph=True))
    return found


def backends(device: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = [("torch_native", TorchNativeBackend)]
    if device == "cuda":
        try:
            from attnplug_triton.backend import TritonBackend
        except ImportError as error:
            print(f"without triton: {error}", file=sys.stderr)
        else:
            found.insert(0, ("triton", TritonBackend))
    return found


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
