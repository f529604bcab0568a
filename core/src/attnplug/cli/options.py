"""Options that explain and resolve share, and the deployment they describe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..request import Deployment, Speculation
from ..sources import parse_text

if TYPE_CHECKING:
    from ..config import AttentionConfig
    from ..decision import Decision
    from ..manager import BackendManager

Model = Annotated[
    str | None, typer.Option("--model", help="A checkpoint's folder or GGUF file; without it no layer is checked.")
]
Config = Annotated[str | None, typer.Option("--config", help="A TOML, JSON or YAML file.")]
Prefill = Annotated[str | None, typer.Option("--prefill", help="A backend, several with commas, or auto.")]
Decode = Annotated[str | None, typer.Option("--decode", help="A backend, several with commas, or auto.")]
Linear = Annotated[str | None, typer.Option("--linear", help="The same, for linear attention.")]
Device = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, cuda:1; cuda@sm90 for one of another machine.")
]
PageSize = Annotated[str | None, typer.Option("--page-size", help="Tokens a page, or auto.")]
KVDtype = Annotated[str | None, typer.Option("--kv-dtype", help="auto, bfloat16, float16, float32, float8_e4m3fn, …")]
Fallback = Annotated[str | None, typer.Option("--fallback", help="never, listed or reference.")]
Plugins = Annotated[list[str] | None, typer.Option("--plugin", help="Turn on a plugin without a backend.")]
Speculate = Annotated[Speculation, typer.Option("--speculation", help="Whether drafts are verified, and their form.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def overrides(
    *,
    prefill: str | None,
    decode: str | None,
    linear: str | None,
    page_size: str | None,
    kv_dtype: str | None,
    fallback: str | None,
    plugins: list[str] | None,
) -> dict[str, Any]:
    """Return the command line's rung of the ladder: only what was given."""
    names = {"attention.prefill": prefill, "attention.decode": decode, "attention.linear": linear}
    given: dict[str, Any] = {
        key: parse_text(text, "names", source="command line", key=key)
        for key, text in names.items()
        if text is not None
    }
    if page_size is not None:
        given["attention.page_size"] = parse_text(page_size, "int", source="--page-size", key="attention.page_size")
    given |= {
        key: text
        for key, text in (("attention.kv_dtype", kv_dtype), ("attention.fallback", fallback))
        if text is not None
    }
    if plugins:
        given["plugins.load"] = plugins
    return given


def decide(
    config: AttentionConfig, *, model: str | None, device: str | None, speculation: Speculation
) -> tuple[Decision, BackendManager]:
    """Resolve what the options ask for, with the manager that probed."""
    from ..manager import BackendManager
    from ..model_source import load_model_spec
    from ..select import resolve

    manager = BackendManager(config=config)
    spec = load_model_spec(model, manager.catalog.scan) if model is not None else None
    decision = resolve(
        spec, config, device, manager.catalog, deployment=Deployment(speculation=speculation), prober=manager
    )
    return decision, manager
