"""``attnplug resolve``: choose the backends, and write the choice as a lock."""

from __future__ import annotations

from typing import Annotated

import typer

from ..request import Speculation
from . import options
from .options import (
    Config,
    Decode,
    Device,
    Fallback,
    Json,
    KVDtype,
    Linear,
    Model,
    PageSize,
    Plugins,
    Prefill,
    Speculate,
)
from .output import print_table

app = typer.Typer(add_completion=False)


@app.command()
def command(
    model: Model = None,
    config: Config = None,
    prefill: Prefill = None,
    decode: Decode = None,
    linear: Linear = None,
    device: Device = None,
    page_size: PageSize = None,
    kv_dtype: KVDtype = None,
    fallback: Fallback = None,
    plugin: Plugins = None,
    speculation: Speculate = Speculation.NONE,
    output: Annotated[str | None, typer.Option("-o", "--output", help="Write the lock to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Choose the backends, and write the choice as a lock that other ranks load."""
    from ..config import AttentionConfig
    from ..lock import write_lock

    given = options.overrides(
        prefill=prefill,
        decode=decode,
        linear=linear,
        page_size=page_size,
        kv_dtype=kv_dtype,
        fallback=fallback,
        plugins=plugin,
    )
    loaded = AttentionConfig.load(config, overrides=given)
    decision, _ = options.decide(loaded, model=model, device=device, speculation=speculation)
    if output is not None:
        write_lock(decision, output)
    if as_json:
        print(decision.to_json(), end="")
        return
    print_table(
        ("ROLE", "BACKEND", "DISTRIBUTION", "VERSION", "DECIDED BY"),
        [
            (one.role.value, one.name, one.chosen.distribution, one.chosen.version, f"{one.rung} {one.source}".strip())
            for one in decision.choices
        ],
    )
    print(f"page size {decision.page_size}, KV dtype {decision.kv_dtype or 'of the model'}, device {decision.device}")
    if output is not None:
        print(f"lock written to {output}")
