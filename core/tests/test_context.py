"""The forward context: scoped, restored, private to a thread."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from attnplug.context import ForwardContext, forward_context, get_attn_backend, get_forward_context
from attnplug.errors import ContractViolation
from attnplug.layer import AttentionLayer

from .batches import decode_batch
from .test_members import leaf


def test_a_layer_outside_a_forward_says_how_to_call_it() -> None:
    layer = AttentionLayer(2, 8, 1.0, 2, 0)
    with pytest.raises(ContractViolation, match="forward_context"):
        layer(torch.zeros(1, 2, 8), None, None, decode_batch([1]))


def test_an_override_holds_inside_and_is_restored_also_after_an_exception() -> None:
    outer, inner = leaf("outer"), leaf("inner")
    with forward_context(ForwardContext(outer)) as context:
        assert get_attn_backend() is outer
        with pytest.raises(RuntimeError), forward_context(replace(context, attn_backend=inner)):  # noqa: PT012
            assert get_attn_backend() is inner
            raise RuntimeError
        assert get_attn_backend() is outer
    with pytest.raises(ContractViolation):
        get_forward_context()


def test_two_threads_each_see_their_own() -> None:
    seen: dict[str, str] = {}
    barrier = threading.Barrier(2)

    def run(name: str) -> None:
        with forward_context(ForwardContext(leaf(name))):
            barrier.wait(10)
            seen[name] = get_attn_backend().name
            barrier.wait(10)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"a": "a", "b": "b"}
