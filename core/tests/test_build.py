"""Assembly: which object a decision becomes, in which order, and what each leaf knows afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from attnplug.assembly.build import AttentionBackends, DeploymentForm, build_attention_backends
from attnplug.assembly.env import BackendEnv, WorkspacePolicy
from attnplug.backend import AttentionBackend
from attnplug.decision import Candidate, Choice, Decision
from attnplug.errors import ConfigError, ContractViolation
from attnplug.manager import Created
from attnplug.model_spec import LayerSpec, ModelSpec
from attnplug.modes import ForwardMode
from attnplug.request import Role
from attnplug.spec import Kind
from attnplug.wrappers.hybrid import HybridAttnBackend
from attnplug.wrappers.hybrid_linear import HybridLinearAttnBackend
from attnplug.wrappers.two_batch import TwoBatchOverlapBackend

from .spike_world import LIBRARY_SPEC, MODEL, World


class Maker:
    """Stands for a plugin manager: creates a recording leaf for whatever a decision chose."""

    def __init__(self) -> None:
        self.made: list[tuple[str, BackendEnv]] = []
        self.log: list[str] = []

    def create(self, decision: Decision, role: Role, env: BackendEnv, *, wrap: bool) -> Created:
        choice = decision.choice(role)
        assert choice is not None
        assert not wrap, "wrappers go outside the composition, once"
        self.made.append((choice.name, env))
        return Created(AttentionBackend(LIBRARY_SPEC.replace(name=choice.name), env), choice.name)

    def wrap_backend(self, backend: AttentionBackend, env: BackendEnv) -> AttentionBackend:
        self.log.append(f"wrap {backend.name}")
        return backend


def decision_of(mode: str = "decode", **names: str) -> Decision:
    choices = tuple(
        Choice(
            role=Role(role.replace("draft_", "draft.")), chosen=Candidate(name, "dist", "1"), asked=(name,), rung="file"
        )
        for role, name in names.items()
    )
    return Decision(choices=choices, speculative_attention_mode=mode)


def build(decision: Decision, model: ModelSpec, maker: Maker | None = None, **kwargs: Any) -> AttentionBackends:
    return build_attention_backends(model, decision, World().env, maker or Maker(), **kwargs)  # type: ignore[arg-type]


SOFTMAX_ONLY = MODEL.subset([0, 2])


def test_one_name_is_one_backend() -> None:
    maker = Maker()
    built = build(decision_of(prefill="a", decode="a"), SOFTMAX_ONLY, maker)
    assert built.attn_backend.name == "a"
    assert built.attn_backend.attn_backend_list == ()
    assert [name for name, _ in maker.made] == ["a"]
    assert maker.made[0][1].roles == {Role.PREFILL, Role.DECODE}


def test_two_names_are_a_hybrid_that_verifies_where_the_decision_says() -> None:
    built = build(decision_of("prefill", prefill="a", decode="b"), SOFTMAX_ONLY)
    root = built.attn_backend
    assert isinstance(root, HybridAttnBackend)
    assert (built.prefill, built.decode) == ("a", "b")
    assert root.unwrap(0, ForwardMode.TARGET_VERIFY).name == "a"
    assert root.unwrap(0, ForwardMode.DECODE).name == "b"


def test_linear_layers_go_outside_the_pair() -> None:
    root = build(decision_of(prefill="a", decode="b", linear="l"), MODEL).attn_backend
    assert isinstance(root, HybridLinearAttnBackend)
    assert isinstance(root.full_attn_backend, HybridAttnBackend)
    assert root.unwrap(1, ForwardMode.DECODE).name == "l"
    assert root.unwrap(2, ForwardMode.DECODE).name == "b"


def test_a_pure_state_space_model_is_its_linear_backend_under_both_names() -> None:
    built = build(decision_of(linear="l"), MODEL.subset([1]))
    assert built.attn_backend.name == "l"
    assert (built.prefill, built.decode) == ("l", "l")


def test_overlap_gives_each_half_backends_and_a_workspace_of_its_own() -> None:
    maker = Maker()
    built = build(decision_of(prefill="a", decode="b", linear="l"), MODEL, maker, form=DeploymentForm.TWO_BATCH_OVERLAP)
    assert isinstance(built.attn_backend, TwoBatchOverlapBackend)
    assert all(isinstance(child, HybridLinearAttnBackend) for child in built.attn_backend.attn_backend_list)
    assert [name for name, _ in maker.made] == ["a", "b", "l"] * 2
    assert {env.workspace for _, env in maker.made} == {WorkspacePolicy.NEW}
    assert len(set(map(id, built.attn_backend.leaves()))) == 6


def test_a_draft_has_its_own_backends_and_no_overlap() -> None:
    decision = decision_of(prefill="a", decode="a", draft_prefill="d", draft_decode="d")
    built = build(decision, SOFTMAX_ONLY, draft=True, form=DeploymentForm.TWO_BATCH_OVERLAP)
    assert built.attn_backend.name == "d"


def test_wrapping_stamping_and_binding_precede_on_ready() -> None:
    maker = Maker()

    def ready(root: AttentionBackend) -> None:
        assert root.kv_index_translator is not None
        assert {leaf.decode_attention_backend_str for leaf in root.leaves()} == {"b"}
        assert {leaf.prefill_attention_backend_str for leaf in root.leaves()} == {"a"}
        maker.log.append("ready")

    build(decision_of(prefill="a", decode="b", linear="l"), MODEL, maker, on_ready=ready)
    assert maker.log == ["wrap HybridLinearAttnBackend(HybridAttnBackend(a, b), l)", "ready"]


def test_a_decision_without_the_roles_a_model_needs_is_refused() -> None:
    with pytest.raises(ConfigError, match="names no backend for prefill and decode"):
        build(decision_of(linear="l"), MODEL)


def test_a_leaf_that_reads_through_another_translator_is_refused() -> None:
    class Foreign(Maker):
        def create(self, *args: Any, **kwargs: Any) -> Created:
            made = super().create(*args, **kwargs)
            made.backend.kv_index_translator = World().translator
            return made

    with pytest.raises(ContractViolation, match="another translator"):
        build(decision_of(prefill="a", decode="a"), SOFTMAX_ONLY, Foreign())


def test_the_layer_kinds_decide_the_form() -> None:
    only_latent = ModelSpec(
        name="m", layers=(LayerSpec(layer_id=0, kind=Kind.MLA),), dtype="float32", max_context_len=8
    )
    assert build(decision_of(prefill="a", decode="a"), only_latent).attn_backend.name == "a"
