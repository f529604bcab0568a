"""``attnplug generate``: text from a model, through the backends that a configuration names."""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnplug.errors import AttnplugError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .engine import Engine
    from .errors import StepFailed
    from .printer import Printer
    from .progress import Reporter
    from .results import Completion
    from .sampling import SamplingParams
    from .verify import Difference

app = typer.Typer(add_completion=False)

DIFFERS = 1
USER_MUST_MEND = 2

Model = Annotated[
    str, typer.Option("--model", help="A folder, a .gguf file, smollm2, glassllm, or an id on the Hugging Face Hub.")
]
Prompts = Annotated[list[str] | None, typer.Option("--prompt", help="A prompt; give it again for more.")]
PromptsFile = Annotated[Path | None, typer.Option("--prompts-file", help="A text file with a prompt a line.")]
Config = Annotated[str | None, typer.Option("--config", help="A TOML, JSON or YAML file.")]
Prefill = Annotated[str | None, typer.Option("--prefill", help="A backend, several with commas, or auto.")]
Decode = Annotated[str | None, typer.Option("--decode", help="A backend, several with commas, or auto.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", help="Most new tokens a prompt.")]
DType = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:1; a GPU by default.")]
PageSize = Annotated[str | None, typer.Option("--page-size", help="Tokens a page of the KV pool, or auto.")]
ChunkSize = Annotated[int | None, typer.Option("--chunk-size", help="Most prompt tokens of a step.")]
BatchSize = Annotated[int, typer.Option("--max-batch-size", help="Most prompts that run at once.")]
Graphs = Annotated[str | None, typer.Option("--graphs", help="auto: CUDA graphs where they are served; off.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens that reach this probability.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep this many tokens; 0 keeps all.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The same seed gives the same tokens.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="A text that ends a completion; may be repeated.")]
Chat = Annotated[bool, typer.Option("--chat", help="Put each prompt in the model's chat template.")]
Stream = Annotated[bool, typer.Option("--stream", help="Print text as it comes.")]
Verify = Annotated[bool, typer.Option("--verify", help="Compare with transformers' own attention, token for token.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def command(
    model: Model,
    prompt: Prompts = None,
    prompts_file: PromptsFile = None,
    config: Config = None,
    prefill: Prefill = None,
    decode: Decode = None,
    max_new_tokens: MaxNewTokens = 128,
    dtype: DType = "auto",
    device: Device = None,
    page_size: PageSize = None,
    chunk_size: ChunkSize = None,
    max_batch_size: BatchSize = 32,
    graphs: Graphs = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    stop: Stop = None,
    chat: Chat = False,
    stream: Stream = False,
    verify: Verify = False,
    as_json: Json = False,
) -> None:
    """Generate text, several prompts at once. Exit code 1: --verify found a difference; 2: for you to mend."""
    from attnplug.cli.options import overrides
    from attnplug.config import AttentionConfig

    prompts = _read_prompts(prompt, prompts_file)
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens is {max_new_tokens}; allowed: at least 1", key="max_new_tokens")
    given = overrides(
        prefill=prefill, decode=decode, linear=None, page_size=page_size, kv_dtype=None, fallback=None, plugins=None
    )
    if graphs is not None:
        given["attention.graphs"] = graphs
    attention = AttentionConfig.load(config, overrides=given)

    from .engine import Engine
    from .printer import Printer
    from .progress import Reporter
    from .sampling import SamplingParams

    sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=tuple(stop or ()))
    if verify and (not sampling.is_greedy or sampling.stop):
        raise ConfigError(
            "--verify compares the likeliest tokens; it cannot be given with --temperature, --top-p, --seed or --stop",
            remedy="leave out --verify, or the others",
        )
    report = Reporter()
    with report.loading(model):
        engine = Engine.from_pretrained(
            model,
            attention=attention,
            device=device,
            dtype=dtype,
            chunk_size=chunk_size,
            max_batch_size=max_batch_size,
            # A step holds at least a token of each running prompt.
            max_num_tokens=max(2048, max_batch_size),
        )
    with engine:
        report.say(_describe(engine))
        tokens = [_encode(engine, text, chat=chat) for text in prompts]
        printer = Printer(prompts, live=stream and not as_json)
        start = time.perf_counter()
        try:
            completions = _generate(engine, tokens, max_new_tokens, sampling, report, printer)
        except AttnplugError:
            raise
        # A kernel or a model may raise anything; a command tells it in one message, with its place.
        except Exception as error:
            raise _step_failed(engine, error) from error
        seconds = time.perf_counter() - start
        difference = _verify(engine, tokens, completions, max_new_tokens, report) if verify else None
        if as_json:
            facts = _facts(engine, model, prompts, completions, seconds)
            facts["verify"] = None if not verify else "identical" if difference is None else difference._asdict()
            print(json.dumps(facts, indent=2, ensure_ascii=False))
        else:
            printer.finish(completions)
        count = sum(len(one.token_ids) for one in completions)
        report.say(f"{count} tokens in {seconds:.1f} s: {count / max(seconds, 1e-9):.1f} tokens/s", "bold")
        _end(engine, completions, verify, difference, as_json=as_json)


def _read_prompts(given: Sequence[str] | None, path: Path | None) -> list[str]:
    from .intake import text_fault

    prompts = list(given or ())
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompts-file {path} cannot be read: {error}", source=str(path)) from error
        prompts += [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(
            "there is no prompt", remedy="give --prompt TEXT, or --prompts-file FILE with a prompt a line"
        )
    empty = [str(place) for place, text in enumerate(prompts) if not text]
    if empty:
        raise ConfigError(f"prompt {', '.join(empty)} is empty; allowed: at least one character", key="prompt")
    broken = [f"prompt {place}: {fault}" for place, text in enumerate(prompts) if (fault := text_fault(text))]
    if broken:
        raise ConfigError("; ".join(broken), key="prompt")
    return prompts


def _encode(engine: Engine, text: str, *, chat: bool) -> list[int]:
    tokenizer: Any = engine.tokenizer
    if tokenizer is None:
        raise ConfigError("this model has no tokenizer", remedy="add tokenizer.json to its folder")
    if not chat:
        return list(tokenizer.encode(text))
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("--chat: this model's tokenizer has no chat template", remedy="leave out --chat")
    messages = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def _generate(
    engine: Engine,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: SamplingParams,
    report: Reporter,
    printer: Printer,
) -> list[Completion]:
    from .results import Completion

    tokens: list[list[int]] = [[] for _ in prompts]
    texts, ends, errors = [""] * len(prompts), ["length"] * len(prompts), [""] * len(prompts)
    stream = engine.generate_stream(prompts, max_new_tokens, sampling)
    with report.counting("generating", len(prompts) * max_new_tokens, hidden=printer.live) as advance:
        for chunk in stream:
            at = chunk.index
            tokens[at] += chunk.token_ids
            texts[at] += chunk.text
            advance(len(chunk.token_ids))
            if chunk.finish_reason is not None:
                ends[at], errors[at] = chunk.finish_reason, chunk.error
                advance(max_new_tokens - len(tokens[at]))
            printer.push(at, chunk.text, ended=chunk.finish_reason is not None)
    return [Completion(t, text, end, error) for t, text, end, error in zip(tokens, texts, ends, errors)]  # type: ignore[arg-type]


def _step_failed(engine: Engine, error: Exception) -> StepFailed:
    from .errors import StepFailed

    frame = traceback.extract_tb(error.__traceback__)[-1]
    prefill, decode = _names(engine)
    return StepFailed(
        f"a step failed (prefill {prefill}, decode {decode}): {type(error).__name__}: {error}\n"
        f"  at {frame.filename}:{frame.lineno} in {frame.name}",
        remedy="--prefill torch_native --decode torch_native tells a backend's fault from the model's",
    )


def _verify(
    engine: Engine, prompts: list[list[int]], completions: list[Completion], max_new_tokens: int, report: Reporter
) -> Difference | None:
    from .verify import find_difference

    with report.counting("comparing with transformers", len(prompts)) as advance:
        return find_difference(
            engine.model,
            prompts,
            [one.token_ids for one in completions],
            max_new_tokens=max_new_tokens,
            max_context_len=engine.sizes.max_context_len,
            on_prompt=lambda: advance(1),
        )


def _end(
    engine: Engine, completions: list[Completion], verified: bool, difference: Difference | None, *, as_json: bool
) -> None:
    failed = [f"prompt {at}: {one.error}" for at, one in enumerate(completions) if one.finish_reason == "error"]
    if failed:
        print("attnplug: error: " + "\n  ".join(failed), file=sys.stderr)
        raise typer.Exit(USER_MUST_MEND)
    if verified and not as_json:
        print("identical" if difference is None else _tell(engine, difference))
    if difference is not None:
        raise typer.Exit(DIFFERS)


def _tell(engine: Engine, found: Difference) -> str:
    tokenizer: Any = engine.tokenizer

    def word(token: int | None) -> str:
        return "the end" if token is None else f"{token} {tokenizer.decode([token])!r}"

    return (
        f"differs: prompt {found.prompt}, new token {found.position}: "
        f"attnplug gives {word(found.ours)}, transformers {word(found.theirs)}"
    )


def _names(engine: Engine) -> tuple[str, str]:
    return engine.backend.prefill_attention_backend_str, engine.backend.decode_attention_backend_str


def _describe(engine: Engine) -> str:
    prefill, decode = _names(engine)
    dtype = str(engine.dtype).removeprefix("torch.")
    return f"prefill {prefill}, decode {decode}, pages of {engine.sizes.page_size}, {dtype} on {engine.device}"


def _facts(
    engine: Engine, model: str, prompts: list[str], completions: list[Completion], seconds: float
) -> dict[str, Any]:
    prefill, decode = _names(engine)
    count = sum(len(one.token_ids) for one in completions)
    return {
        "model": model,
        "prefill": prefill,
        "decode": decode,
        "page_size": engine.sizes.page_size,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "device": str(engine.device),
        "graphs": engine.graphs.facts(),
        "completions": [
            {
                "prompt": prompt,
                "token_ids": one.token_ids,
                "text": one.text,
                "finish_reason": one.finish_reason,
                "error": one.error,
            }
            for prompt, one in zip(prompts, completions)
        ],
        "tokens": count,
        "seconds": seconds,
        "tokens_per_second": count / max(seconds, 1e-9),
    }
