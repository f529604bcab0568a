"""Whether a spec can be read without its kernels: imported in a fresh interpreter, and what came with it looked at."""

from __future__ import annotations

import json
import subprocess
import sys

from ..catalog import Catalog

DENIED = (
    "torch",
    "triton",
    "numpy",
    "pydantic",
    "pluggy",
    "jax",
    "tensorflow",
    "cupy",
    "transformers",
    "flashinfer",
    "flash_attn",
    "flash_mla",
    "fla",
    "vllm",
    "sglang",
)
"""What a spec may not import: each costs from a tenth of a second to many, or needs a GPU's driver."""
SECONDS = 0.5
"""Most CPU time that importing a spec may take; twenty of them are still listed in the time a reader waits."""
TIMEOUT = 60
_CODE = """
import importlib, json, sys, time
module, _, attribute = sys.argv[1].partition(":")
start = time.process_time()
found = getattr(importlib.import_module(module), attribute)
seconds = time.process_time() - start
print(json.dumps({"seconds": seconds, "modules": sorted({name.partition(".")[0] for name in sys.modules}),
                  "name": found.name, "faults": found.validate()}))
"""


def impurities(name: str, kernel_modules: tuple[str, ...]) -> list[str]:
    """Return what is wrong with how an installed backend's spec is read; empty where nothing is.

    Args:
        name: The backend.
        kernel_modules: Its kernel library, denied beside the usual ones.
    """
    entry = Catalog().get(name)
    assert entry.spec_entry_point is not None, "a loaded backend has an announced spec"
    command = [sys.executable, "-c", _CODE, entry.spec_entry_point.value]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return [f"importing {entry.spec_entry_point.value} did not end in {TIMEOUT} s"]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [f"importing {entry.spec_entry_point.value} alone fails: {last}"]
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    denied = {*DENIED, *(module.partition(".")[0] for module in kernel_modules)}
    found = [f"the spec imports {module}" for module in seen["modules"] if module in denied]
    if seen["seconds"] > SECONDS:
        found.append(f"importing the spec takes {seen['seconds']:.2f} s of CPU; at most {SECONDS}")
    return found + [f"the spec is invalid: {fault}" for fault in seen["faults"]]
