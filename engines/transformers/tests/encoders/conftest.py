from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# The models are those of the families' tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "families"))

from family_zoo import NATIVE, SUBJECTS, Case, greedy

from attnplug_transformers import Engine


def _case(name: str, lens: tuple[int, ...] = ()) -> Case:
    subject = next(one for one in SUBJECTS if one.model_class.startswith(name))
    model, given = subject.model(), subject.inputs()
    if lens:
        rng = random.Random(2)
        given = [
            {"input_ids": [rng.randrange(3, 199) for _ in range(n)], "decoder_input_ids": [2, *range(3, 3 + n // 8)]}
            for n in lens
        ]
    return Case(model, given, [greedy(model, one, subject.kind) for one in given])


@pytest.fixture(scope="session")
def bart() -> Case:
    """Seven requests whose encoders are of very different lengths."""
    return _case("Bart", (1, 150, 17, 64, 2, 33, 16))


@pytest.fixture(scope="session")
def whisper() -> Case:
    return _case("Whisper")


@pytest.fixture
def serve() -> Callable[..., Engine]:
    """Make an engine on torch_native that checks every batch."""

    def make(model: Any, *args: Any, **options: Any) -> Engine:
        if "backend_factory" not in options:
            options.setdefault("attention", NATIVE)
        options.setdefault("page_size", 16)
        return Engine(model, *args, check_batches=True, **options)

    return make
