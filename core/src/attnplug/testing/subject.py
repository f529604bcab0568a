"""The backend under test: how it is made, wrapped, and watched so that nobody else serves in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..assembly.env import BackendEnv, WorkspacePolicy
from ..attention_io import AttentionExtras, AttentionOutput
from ..backend import AttentionBackend
from ..batch import ForwardBatch
from ..errors import ContractViolation
from ..layer import AttentionLayer
from ..modes import ForwardMode, GraphLevel
from ..spec import BackendSpec, Kind
from ..wrappers.hybrid import HybridAttnBackend
from ..wrappers.hybrid_linear import HybridLinearAttnBackend
from ..wrappers.two_batch import TwoBatchOverlapBackend
from .results import Failure

BackendFactory = Callable[[BackendEnv], AttentionBackend]
WRAPPERS = ("hybrid", "two_batch", "hybrid_linear")
_RUNS = ("forward", "forward_decode", "forward_extend", "forward_mixed")


@dataclass(frozen=True, slots=True)
class Subject:
    """A backend to judge.

    Args:
        name: What it is called.
        spec: What it declares.
        factory: Makes one; called once for each case and wrapper child.
        device: Where it runs.
        installed: Whether the name is announced by an installed distribution.
        versions: The distribution that brings it, with its version: another's results are not gone on with.
    """

    name: str
    spec: BackendSpec
    factory: BackendFactory
    device: torch.device
    installed: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def find(cls, name: str, device: str | None = None) -> Subject:
        """Return an installed backend.

        Args:
            name: As announced.
            device: torch's name; the first of the declared types that this machine has by default.

        Raises:
            AttnplugError: The name is unknown or unusable, or the device is not there.
        """
        from .installed import find

        return find(name, device)

    def build(self, env: BackendEnv, wrap: str = "") -> Built:
        """Make the backend for an environment, inside a wrapper where one is named; its translator is bound."""
        leaf = self.factory(env)
        root, children = leaf, [leaf]
        if wrap in ("hybrid", "two_batch"):
            # Both may run at once, so the second takes a workspace of its own.
            other = self.factory(env.replace(workspace=WorkspacePolicy.NEW))
            children.append(other)
            root = HybridAttnBackend(leaf, other) if wrap == "hybrid" else TwoBatchOverlapBackend(leaf, other)
        elif wrap == "hybrid_linear":
            full = [spec.layer_id for spec in env.model_spec.layers]
            root = HybridLinearAttnBackend(leaf, _NoLinear(env), full)
        env.translator.bind_and_verify_backends([root])
        return Built(root, [Witness(child, self) for child in children])


@dataclass(slots=True)
class Built:
    """A backend with the witnesses of its leaves."""

    root: AttentionBackend
    witnesses: list[Witness]

    def served(self) -> int:
        """Return how many runs of the subject's own leaves were seen."""
        return sum(witness.runs for witness in self.witnesses)

    def check_served(self, layer_id: int, mode: ForwardMode, before: int) -> str:
        """Return who served a layer's call, or raise Failure where it was not the subject."""
        if self.served() == before:
            raise Failure(
                f"layer {layer_id} was served, but not by a leaf of {self.witnesses[0].subject.name!r}",
                fault="another backend serves",
            )
        leaf = self.root.unwrap(layer_id, mode)
        if all(leaf is not one for witness in self.witnesses for one in witness.leaves):
            raise Failure(
                f"unwrap({layer_id}, {mode.value}) names {leaf.name!r}, which is no leaf of the subject",
                fault="another backend serves",
            )
        return leaf.name


@dataclass(slots=True)
class Witness:
    """Counts the runs of one object's own methods; the object is otherwise as it was."""

    backend: AttentionBackend
    subject: Subject
    runs: int = 0
    leaves: Sequence[AttentionBackend] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if not isinstance(self.backend, AttentionBackend):
            raise Failure(
                f"the factory of {self.subject.name!r} made a {type(self.backend).__name__}, no AttentionBackend"
            )
        self.leaves = tuple(self.backend.leaves())
        strangers = sorted({leaf.name for leaf in self.leaves if leaf.spec.name != self.subject.spec.name})
        if strangers:
            raise Failure(
                f"asked for {self.subject.spec.name!r}, made {', '.join(map(repr, strangers))}",
                fault="another backend serves",
            )
        for leaf in self.leaves:
            for name in _RUNS:
                setattr(leaf, name, self._counted(getattr(leaf, name)))

    def _counted(self, method: Callable[..., AttentionOutput]) -> Callable[..., AttentionOutput]:
        def run(*args: Any, **kwargs: Any) -> AttentionOutput:
            self.runs += 1
            return method(*args, **kwargs)

        return run


class _NoLinear(AttentionBackend):
    """The linear side of a hybrid model whose layers are all softmax: it compiles steps, and no layer reaches it."""

    needs_cpu_seq_lens = False

    def __init__(self, env: BackendEnv) -> None:
        spec = BackendSpec(
            name="conformance-linear",
            kinds=frozenset({Kind.LINEAR}),
            linear_families=frozenset({"none"}),
            device_types=frozenset({env.device.type}),
            modes=frozenset(ForwardMode),
            dtypes=frozenset({str(env.dtype).removeprefix("torch.")}),
            kv_dtypes=frozenset({str(env.kv_dtype).removeprefix("torch.")}),
            needs_cpu_seq_lens=False,
            graph_level=GraphLevel.ALWAYS,
        )
        self.spec, self.env, self._admitted = spec, env, {}

    def check_batch(self, batch: ForwardBatch) -> None:
        """Any step will do: nothing of it is read."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.forward_metadata = batch.forward_mode

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing has a fixed address."""

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        extras: AttentionExtras | None = None,
    ) -> AttentionOutput:
        raise ContractViolation(f"layer {layer.layer_id} is softmax, and was routed to the linear side")
