"""``attnplug explain``: what would run here, which rung of the configuration decided, and why not the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from .output import print_json, print_lines, print_table

if TYPE_CHECKING:
    from ..catalog import Catalog
    from ..config import AttentionConfig
    from ..decision import Choice, Decision

app = typer.Typer(add_completion=False)

_SETTINGS = ("page_size", "kv_dtype", "fallback", "graphs", "speculative_attention_mode")


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
    as_json: Json = False,
) -> None:
    """Say what would run here, and why not the others."""
    from ..config import AttentionConfig

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
    decision, manager = options.decide(loaded, model=model, device=device, speculation=speculation)
    remarks = manager.explain(decision)
    if as_json:
        print_json(
            {
                **decision.to_dict(),
                "roles": [_role(choice, decision, manager.catalog) for choice in decision.choices],
                "settings": _settings(loaded, decision),
                "remarks": remarks,
            }
        )
        return
    what = decision.model or "any model (give --model PATH to check its layers)"
    print(f"{what} on {decision.device}\n")
    for choice in decision.choices:
        asked = ", ".join(choice.asked)
        print(f"{choice.role.value}: {choice.chosen}, asked for {asked} by {choice.rung} {choice.source}".rstrip())
        for row in _role(choice, decision, manager.catalog)["candidates"]:
            print(f"  {row['state']:<14} {row['name']}")
            for reason in row["reasons"]:
                print(f"    {reason['field']}: asked {reason['asked']}, supported {reason['supported']}")
    print()
    rows = [(one["key"], str(one["value"]), f"{one['rung']} {one['source']}") for one in _settings(loaded, decision)]
    print_table(("SETTING", "VALUE", "DECIDED BY"), rows)
    print_lines("Remarks:", remarks)


def _role(choice: Choice, decision: Decision, catalog: Catalog) -> dict[str, Any]:
    """Return a role's candidates, each with its state for this request and every reason against it."""
    rejected = decision.rejected(choice.role)
    candidates = []
    for name in sorted({*catalog.names, *rejected}):
        if name == choice.name:
            state, reasons = "SELECTED", []
        elif name in rejected:
            entry = next((row for row in catalog.rows(name)), None)
            usable = entry is None or entry.state.usable
            state = "REJECTED" if usable or entry is None else entry.state.value
            reasons = [reason._asdict() for reason in rejected[name]]
        elif "auto" in choice.asked or name in choice.asked:
            state, reasons = "ELIGIBLE", []
        else:
            state, reasons = "not asked for", []
        candidates.append({"name": name, "state": state, "reasons": reasons})
    return {
        "role": choice.role.value,
        "chosen": choice.name,
        "rung": choice.rung,
        "source": choice.source,
        "candidates": candidates,
    }


def _settings(config: AttentionConfig, decision: Decision) -> list[dict[str, Any]]:
    rows = []
    for name in _SETTINGS:
        rung = config.rung(f"attention.{name}")
        rows.append({"key": name, "value": getattr(decision, name), "rung": rung.name, "source": rung.source})
    return rows
