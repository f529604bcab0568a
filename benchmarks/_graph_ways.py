"""Ways to serve prompts that ``graphs_gpu.py`` compares: our Engine, with and without graphs, and transformers."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import ContinuousBatchingConfig, GenerationConfig

from attnplug_torch_native.backend import TorchNativeBackend
from attnplug_transformers import Engine

PROMPT, CONTEXT, PAGE = 128, 512, 16


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
