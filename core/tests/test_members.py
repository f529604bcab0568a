"""The member table is the contract: nothing public is outside it, and no wrapper leaves a member at a default."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnplug.backend import AttentionBackend
from attnplug.masks.verify import TreeMaskMode, VerifyMask
from attnplug.members import MEMBERS, Reducer
from attnplug.modes import ForwardMode, GraphLevel, SharedReadEnds
from attnplug.wrappers.composite import CompositeBackend
from attnplug.wrappers.hybrid import HybridAttnBackend
from attnplug.wrappers.hybrid_linear import HybridLinearAttnBackend
from attnplug.wrappers.two_batch import TwoBatchOverlapBackend

from .spike_world import LIBRARY_SPEC, World

# Set on a composite itself, so there is nothing to combine.
OWN_ATTRIBUTES = {"spec", "env", "prefill_attention_backend_str", "decode_attention_backend_str"}


def public(cls: type) -> set[str]:
    names = {n for n in vars(cls) if not n.startswith("_")}
    return names | {n for n in getattr(cls, "__annotations__", {}) if not n.startswith("_")}


def leaf(name: str, **changes: Any) -> AttentionBackend:
    made = AttentionBackend(LIBRARY_SPEC.replace(name=name), World().env)
    for key, value in changes.items():
        setattr(made, key, value)
    return made


def test_every_public_member_of_the_base_has_a_scope_and_a_reducer() -> None:
    assert public(AttentionBackend) | {"spec", "env"} == set(MEMBERS)


def test_a_composite_leaves_no_member_at_the_base_default() -> None:
    missing = set(MEMBERS) - public(CompositeBackend) - OWN_ATTRIBUTES
    assert not missing


@pytest.mark.parametrize("wrapper", [HybridAttnBackend, HybridLinearAttnBackend, TwoBatchOverlapBackend])
def test_a_wrapper_adds_no_public_member_that_callers_would_probe_for(wrapper: type) -> None:
    routing = {"serving", "serving_graphs", "step_parts", "child_for", "select"}
    assert public(wrapper) - set(MEMBERS) <= routing


def combine(first: Any, second: Any, member: str) -> Any:
    pair = TwoBatchOverlapBackend(leaf("a", **{member: first}), leaf("b", **{member: second}))
    return getattr(pair, member)


@pytest.mark.parametrize("member", [n for n, m in MEMBERS.items() if m.reducer is Reducer.OR])
def test_or_members_are_true_when_any_child_says_so(member: str) -> None:
    assert [combine(a, b, member) for a in (False, True) for b in (False, True)] == [False, True, True, True]


@pytest.mark.parametrize("member", [n for n, m in MEMBERS.items() if m.reducer is Reducer.AND])
def test_and_members_are_true_when_every_child_says_so(member: str) -> None:
    assert [combine(a, b, member) for a in (False, True) for b in (False, True)] == [False, False, False, True]


def test_the_smallest_prefill_bound_holds_and_none_is_no_bound() -> None:
    member = "prefill_cuda_graph_max_batch_size"
    assert combine(4, 2, member) == 2
    assert combine(None, 3, member) == 3
    assert combine(None, None, member) is None


def test_the_lowest_graph_level_holds() -> None:
    low, high = leaf("a"), leaf("b")
    low.spec = LIBRARY_SPEC.replace(graph_level=GraphLevel.NONE)
    assert TwoBatchOverlapBackend(low, high).graph_level is GraphLevel.NONE


def test_the_latest_read_end_holds_and_an_unaudited_backend_says_unknown() -> None:
    early, plain = leaf("a", shared_read_ends=lambda mode: SharedReadEnds.PRE_REPLAY), leaf("b")
    assert plain.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.UNKNOWN
    assert TwoBatchOverlapBackend(early, plain).shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.UNKNOWN


def test_the_largest_fill_value_holds() -> None:
    first, second = (leaf(str(n), get_cuda_graph_seq_len_fill_value=lambda n=n: n) for n in (1, 4))
    assert TwoBatchOverlapBackend(first, second).get_cuda_graph_seq_len_fill_value() == 4


def test_refusals_of_metadata_capture_are_joined_and_empty_when_none_refuses() -> None:
    first, second = (leaf(n, metadata_capture_refusal=lambda mode, n=n: n) for n in ("x", "y"))
    assert TwoBatchOverlapBackend(first, second).metadata_capture_refusal(ForwardMode.DECODE) == "x; y"
    willing = [leaf(n, metadata_capture_refusal=lambda mode: "") for n in ("a", "b")]
    assert TwoBatchOverlapBackend(*willing).metadata_capture_refusal(ForwardMode.DECODE) == ""


def test_the_verify_mask_comes_from_the_side_that_verifies() -> None:
    mask = VerifyMask.allocate(
        TreeMaskMode.QLEN_ONLY, max_bs=1, draft_token_num=2, max_context_len=4, device=torch.device("cpu")
    )
    prefill, decode = leaf("p", verify_mask=mask), leaf("d")
    assert HybridAttnBackend(prefill, decode, speculative_attention_mode="decode").verify_mask is None
    assert HybridAttnBackend(prefill, decode, speculative_attention_mode="prefill").verify_mask is mask


def test_graph_state_is_allocated_on_the_sides_that_serve_graphs() -> None:
    asked: list[str] = []

    def record(name: str) -> AttentionBackend:
        return leaf(name, init_cuda_graph_state=lambda bs, tokens, name=name: asked.append(name))

    HybridAttnBackend(record("p"), record("d")).init_cuda_graph_state(4, 4)
    assert asked == ["d"]
    asked.clear()
    HybridAttnBackend(record("p"), record("d"), speculative_attention_mode="prefill").init_cuda_graph_state(4, 4)
    assert asked == ["d", "p"]


@pytest.mark.parametrize("member", ["close", "on_after_cuda_graph_warmup"])
def test_each_members_reach_every_child(member: str) -> None:
    asked: list[str] = []
    children = [leaf(n, **{member: lambda n=n: asked.append(n)}) for n in ("a", "b")]
    getattr(TwoBatchOverlapBackend(*children), member)()
    assert asked == ["a", "b"]


def test_the_translator_is_bound_on_every_leaf_and_a_foreign_one_is_refused() -> None:
    from attnplug.errors import ContractViolation

    world, other = World(), World()
    a, b, c = leaf("a"), leaf("b"), leaf("c")
    root = HybridLinearAttnBackend(HybridAttnBackend(a, b), c, full_attn_layers=(0,))
    world.translator.bind_and_verify_backends([root])
    assert {one.kv_index_translator for one in (a, b, c)} == {world.translator}
    with pytest.raises(ContractViolation, match="'a' reads through another translator"):
        other.translator.bind_and_verify_backends([root])
