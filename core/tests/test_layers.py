"""Which module may import what, checked in fresh interpreters where the forbidden imports fail."""

from __future__ import annotations

import subprocess
import sys

import pytest

STDLIB = (
    "_kernel",
    "_metadata",
    "admission",
    "catalog",
    "decision",
    "device",
    "entry",
    "errors",
    "known",
    "lock",
    "model_source",
    "model_spec",
    "modes",
    "pairing",
    "ranking",
    "request",
    "select",
    "sources",
    "spec",
    "verdict",
)
LISTING = ("cli", "cli.listing", "cli.output")
PLUGGY = ("hookspecs", "plugin", "manager", "_faults", "config", "cli.doctor", "cli.explain", "cli.resolve")

DENY = """
import sys
class Deny:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {denied!r}:
            raise ImportError("this layer may not import " + name)
sys.meta_path.insert(0, Deny())
"""
THIRD_PARTY = {"torch", "pydantic", "pluggy", "typer", "rich", "packaging", "yaml", "click", "transformers", "triton"}


def run(code, denied):
    result = subprocess.run(
        [sys.executable, "-c", DENY.format(denied=sorted(denied)) + code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def imports(modules):
    return "import importlib\n" + "".join(f"importlib.import_module('attnplug.{name}')\n" for name in modules)


@pytest.mark.parametrize(
    ("modules", "denied"),
    [
        (STDLIB, THIRD_PARTY),
        (LISTING, THIRD_PARTY),
        (("config", "_faults"), THIRD_PARTY - {"pydantic"}),
        (PLUGGY, {"torch", "transformers", "triton"}),
    ],
    ids=["stdlib", "listing", "pydantic", "pluggy"],
)
def test_a_layer_imports_nothing_above_it(modules, denied):
    run(imports(modules), denied)


def test_listing_real_plugins_imports_neither_torch_nor_pydantic():
    # A listing looks for kernel libraries through the same finders that would deny them, but loads none.
    code = "from attnplug.cli import main\nsys.exit(main(['list', '--json']) or 'triton' in sys.modules)"
    assert run(code, {"torch", "pydantic", "pluggy", "typer", "transformers"}).startswith("[")


def test_the_deny_list_is_able_to_fail():
    with pytest.raises(AssertionError, match="may not import pydantic"):
        run(imports(["config"]), {"pydantic"})
