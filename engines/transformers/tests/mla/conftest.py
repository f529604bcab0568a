from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnplug_transformers import Engine

# Test modules import their helpers by name; pytest's importlib mode adds no folder by itself.
sys.path.insert(0, str(Path(__file__).parent))

from mla_world import NATIVE, Case, make_case


@pytest.fixture(params=["v2", "v3-yarn"])
def deepseek(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


@pytest.fixture
def v3() -> Case:
    return make_case("v3-yarn")


@pytest.fixture
def case() -> Callable[[str], Case]:
    return make_case


@pytest.fixture
def serve() -> Callable[..., Engine]:
    """Make an engine on torch_native that checks every batch."""

    def make(model: Any, **options: Any) -> Engine:
        if "backend_factory" not in options:
            options.setdefault("attention", NATIVE)
        if "num_pages" not in options:
            options.setdefault("kv_cache_bytes", 16 << 20)
        return Engine(model, check_batches=True, **options)

    return make
