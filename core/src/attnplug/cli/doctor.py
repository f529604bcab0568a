"""``attnplug doctor``: versions, device, plugins with their tracebacks, stale metadata, and what to install."""

from __future__ import annotations

import contextlib
import platform
import sys
from typing import Annotated, Any

import typer

from .. import known
from .._metadata import Scan, installed_version
from ..catalog import Catalog
from ..entry import State
from ..errors import AttnplugError
from ..spec import CONTRACT, CONTRACT_FEATURES
from .options import Config, Json
from .output import print_json, print_lines, print_table

app = typer.Typer(add_completion=False)

_VERSIONS = ("attnplug", "torch", "pluggy", "pydantic", "typer", "rich", "packaging", "triton", "transformers")


@app.command()
def command(
    config: Config = None,
    load: Annotated[bool, typer.Option("--load", help="Also import each plugin, and show what fails.")] = False,
    as_json: Json = False,
) -> None:
    """Show versions, device, plugins with their tracebacks, and what to install."""
    from ..config import AttentionConfig
    from ..manager import BackendManager

    problems: list[str] = []
    try:
        loaded = AttentionConfig.load(config)
    except AttnplugError as error:
        problems.append(str(error))
        loaded = AttentionConfig()
    catalog = loaded.catalog()
    entries = catalog.entries
    if load:
        manager = BackendManager(catalog, AttentionConfig())
        for entry in entries:
            if entry.state.usable:
                # A failure is on the entry's row then, with its traceback, and printed below.
                with contextlib.suppress(AttnplugError):
                    manager.load(entry.name)
    report = _report(catalog, problems)
    if as_json:
        print_json(report)
    else:
        _print(report)


def _report(catalog: Catalog, problems: list[str]) -> dict[str, Any]:
    scan = catalog.scan
    device = _device(problems)
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "contract": ".".join(map(str, CONTRACT)),
        "features": sorted(CONTRACT_FEATURES),
        "versions": {name: installed_version(name) for name in _VERSIONS},
        "device": device,
        "scan": {"milliseconds": round(scan.seconds * 1e3, 2), "distributions": scan.num_dists},
        "copies": [{"distribution": d.name, "version": d.version, "location": d.location} for d in scan.copies],
        "plugins": [{**entry.as_dict(), "traceback": entry.traceback} for entry in catalog.entries],
        "problems": [*problems, *_problems(catalog, scan)],
        "advice": _advice(catalog),
    }


def _device(problems: list[str]) -> dict[str, Any]:
    try:
        import torch
    except Exception as error:  # A broken torch fails in many ways, and is what a reader came to learn.
        problems.append(f"torch cannot be imported: {type(error).__name__}: {error}")
        return {"cuda": None, "devices": []}
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = []
    for index in range(count):
        major, minor = torch.cuda.get_device_capability(index)
        devices.append({"index": index, "name": torch.cuda.get_device_name(index), "capability": f"sm_{major}{minor}"})
    return {"cuda": torch.version.cuda, "devices": devices, "threads": torch.get_num_threads()}


def _problems(catalog: Catalog, scan: Scan) -> list[str]:
    problems = list(scan.faults)
    first = {dist.name: dist for dist in scan.copies if not dist.shadowed}
    for dist in scan.stale:
        used = first.get(dist.name)
        problems.append(
            f"stale metadata: {dist} in {dist.location} is hidden by {used} in {used.location if used else ''}"
        )
    broken = (State.BROKEN_SPEC, State.BROKEN_LOAD, State.CONFLICT, State.INCOMPATIBLE, State.MISSING_KERNEL)
    for entry in catalog.entries:
        if entry.state in broken:
            reasons = "; ".join(map(str, entry.reasons))
            problems.append(f"{entry.name} ({entry.dist}) is {entry.state.value}: {reasons}")
    return problems


def _advice(catalog: Catalog) -> list[str]:
    advice = []
    if not any(entry.state.usable for entry in catalog.entries):
        advice.append(f"nothing here can serve: {known.install_command(known.REFERENCE)}")
    for dist in catalog.scan.stale:
        advice.append(f"remove the stale copy of {dist} from {dist.location}")
    for entry in catalog.entries:
        if entry.state is State.MISSING_KERNEL:
            advice.append(f"pip install '{entry.distribution}[kernel]'")
        elif entry.state is State.CONFLICT:
            advice.append(f"[provider] {entry.name} = {entry.distribution!r} settles who is meant by {entry.name}")
        elif entry.state in (State.BROKEN_SPEC, State.BROKEN_LOAD, State.INCOMPATIBLE):
            advice.append(f"upgrade, repair or uninstall {entry.distribution}")
    return list(dict.fromkeys(advice))


def _print(report: dict[str, Any]) -> None:
    print(f"Python {report['python']} on {report['platform']}; contract {report['contract']}")
    print(", ".join(f"{name} {version or 'absent'}" for name, version in report["versions"].items()))
    device = report["device"]
    gpus = [f"cuda:{one['index']} {one['name']} {one['capability']}" for one in device["devices"]]
    print(f"devices: cpu{''.join(', ' + gpu for gpu in gpus)}; CUDA of torch: {device['cuda'] or 'none'}")
    scan = report["scan"]
    print(f"metadata of {scan['distributions']} distributions read in {scan['milliseconds']} ms\n")
    rows = [(one["name"], one["state"], one["distribution"], one["version"]) for one in report["plugins"]]
    print_table(("NAME", "STATE", "DISTRIBUTION", "VERSION"), rows)
    print_lines("Problems:", report["problems"])
    print_lines("Tracebacks:", [f"{one['name']}:\n{one['traceback']}" for one in report["plugins"] if one["traceback"]])
    print_lines("What to do:", report["advice"])
