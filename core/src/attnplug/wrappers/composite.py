"""What every wrapper is: children, a routing rule, and each member combined as ``attnplug.members`` says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..attention_io import AttentionExtras, AttentionOutput
from ..backend import AttentionBackend
from ..batch import ForwardBatch
from ..kv.translator import KVIndexTranslator
from ..layer import AttentionLayer
from ..masks.verify import VerifyMask
from ..modes import ForwardMode, GraphLevel, SharedReadEnds
from ..spec_info import SpecInfo


class StepPart(NamedTuple):
    """A child with the part of a step that it serves."""

    backend: AttentionBackend
    batch: ForwardBatch


class JoinedMetadata(NamedTuple):
    """The children's metadata, in the order of ``attn_backend_list``."""

    parts: tuple[Any, ...]


class CompositeBackend(AttentionBackend):
    """A backend made of children. A subclass says who serves what; everything else follows from the member table.

    Args:
        children: In a fixed order; never empty, and never one twice.
    """

    def __init__(self, children: Sequence[AttentionBackend]) -> None:
        self._children = tuple(children)
        super().__init__(self._children[0].spec, self._children[0].env)
        self._step: tuple[ForwardBatch, Sequence[StepPart]] | None = None

    # Routing: what a subclass defines.

    def serving(self, mode: ForwardMode) -> Sequence[AttentionBackend]:
        """Return the children that take part in a step of a mode."""
        return self._children

    def serving_graphs(self) -> Sequence[AttentionBackend]:
        """Return the children whose steps are captured."""
        return self._children

    def step_parts(self, batch: ForwardBatch) -> Sequence[StepPart]:
        """Return which child serves which part of a step."""
        return [StepPart(child, batch) for child in self.serving(batch.forward_mode)]

    def child_for(self, layer_id: int, mode: ForwardMode) -> AttentionBackend:
        """Return the child that runs a layer."""
        raise NotImplementedError(f"{type(self).__name__} must route layers")

    def parts_of(self, batch: ForwardBatch) -> Sequence[StepPart]:
        """Return ``step_parts``, made once a step: no layer constructs a batch, and children see one identity."""
        if self._step is None or self._step[0] is not batch:
            self._step = (batch, self.step_parts(batch))
        return self._step[1]

    # Own

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({', '.join(child.name for child in self._children)})"

    @property
    def attn_backend_list(self) -> Sequence[AttentionBackend]:
        return self._children

    def leaves(self) -> Iterator[AttentionBackend]:
        seen: set[int] = set()
        for child in self._children:
            for leaf in child.leaves():
                if id(leaf) not in seen:
                    seen.add(id(leaf))
                    yield leaf

    # Step scope

    def check_batch(self, batch: ForwardBatch) -> None:
        for part in self.parts_of(batch):
            part.backend.check_batch(part.batch)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        for part in self.parts_of(batch):
            part.backend.init_forward_metadata(part.batch)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        for part in self.parts_of(batch):
            part.backend.init_forward_metadata_out_graph(part.batch, in_capture)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        for part in self.parts_of(batch):
            part.backend.init_forward_metadata_in_graph(part.batch)

    @property
    def forward_metadata(self) -> JoinedMetadata:
        return JoinedMetadata(tuple(child.forward_metadata for child in self._children))

    @forward_metadata.setter
    def forward_metadata(self, joined: JoinedMetadata) -> None:
        for child, part in zip(self._children, joined.parts, strict=True):
            child.forward_metadata = part

    def init_forward_metadata_for_breakable_cuda_graph_capture(self, batch: ForwardBatch) -> JoinedMetadata:
        made = {
            id(part.backend): part.backend.init_forward_metadata_for_breakable_cuda_graph_capture(part.batch)
            for part in self.parts_of(batch)
        }
        return JoinedMetadata(tuple(made.get(id(child)) for child in self._children))

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(
        self, captured: JoinedMetadata, batch: ForwardBatch, *, static_forward_batch: ForwardBatch | None = None
    ) -> None:
        by_child = {id(child): part for child, part in zip(self._children, captured.parts, strict=True)}
        static = (
            {}
            if static_forward_batch is None
            else {id(part.backend): part.batch for part in self.step_parts(static_forward_batch)}
        )
        for part in self.parts_of(batch):
            part.backend.prepare_forward_metadata_for_breakable_cuda_graph_replay(
                by_child[id(part.backend)], part.batch, static_forward_batch=static.get(id(part.backend))
            )

    @property
    def verify_mask(self) -> VerifyMask | None:  # type: ignore[override]
        masks = [child.verify_mask for child in self.serving(ForwardMode.TARGET_VERIFY)]
        return next((mask for mask in masks if mask is not None), None)

    def update_verify_buffers_to_fill_after_draft(self, spec_info: SpecInfo, bs: int) -> None:
        for child in self.serving(ForwardMode.TARGET_VERIFY):
            child.update_verify_buffers_to_fill_after_draft(spec_info, bs)

    def commit_verify(self, accepted_steps: Tensor, batch: ForwardBatch) -> None:
        for part in self.parts_of(batch):
            part.backend.commit_verify(accepted_steps, part.batch)

    # Layer scope

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
        child = self.child_for(layer.layer_id, batch.forward_mode)
        part = next(part for part in self.parts_of(batch) if part.backend is child)
        return child.forward(q, k, v, layer, part.batch, save_kv_cache, extras)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        extras: AttentionExtras | None = None,
    ) -> AttentionOutput:
        return self.forward(q, k, v, layer, batch, save_kv_cache, extras)

    forward_extend = forward_decode
    forward_mixed = forward_decode

    def indexer_metadata(self, layer_id: int, batch: ForwardBatch) -> Any:
        return self.child_for(layer_id, batch.forward_mode).indexer_metadata(layer_id, batch)

    def unwrap(self, layer_id: int, mode: ForwardMode) -> AttentionBackend:
        return self.child_for(layer_id, mode).unwrap(layer_id, mode)

    # Lifetime scope

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for child in self.serving_graphs():
            child.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return max(child.get_cuda_graph_seq_len_fill_value() for child in self.serving_graphs())

    def on_after_cuda_graph_warmup(self) -> None:
        for child in self.serving_graphs():
            child.on_after_cuda_graph_warmup()

    @property
    def graph_level(self) -> GraphLevel:
        return min(child.graph_level for child in self.serving_graphs())

    @property
    def use_captured_forward_metadata_for_breakable_cuda_graph(self) -> bool:  # type: ignore[override]
        return all(
            child.use_captured_forward_metadata_for_breakable_cuda_graph for child in self.serving(ForwardMode.EXTEND)
        )

    @property
    def prefill_cuda_graph_max_batch_size(self) -> int | None:  # type: ignore[override]
        bounds = [child.prefill_cuda_graph_max_batch_size for child in self.serving(ForwardMode.EXTEND)]
        return min((bound for bound in bounds if bound is not None), default=None)

    def metadata_capture_refusal(self, mode: ForwardMode) -> str:
        reasons = (child.metadata_capture_refusal(mode) for child in self.serving(mode))
        return "; ".join(dict.fromkeys(reason for reason in reasons if reason))

    def shared_read_ends(self, mode: ForwardMode) -> SharedReadEnds:
        return max(child.shared_read_ends(mode) for child in self.serving(mode))

    @property
    def needs_cpu_seq_lens(self) -> bool:
        asked = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
        return any(child.needs_cpu_seq_lens for mode in asked for child in self.serving(mode))

    @needs_cpu_seq_lens.setter
    def needs_cpu_seq_lens(self, value: bool) -> None:
        """Ignore the base's assignment: a composite's answer is its children's."""

    @property
    def supports_ragged_verify_graph(self) -> bool:  # type: ignore[override]
        return all(child.supports_ragged_verify_graph for child in self.serving(ForwardMode.TARGET_VERIFY))

    @property
    def extend_dummy_seqs_capped_by_req_pool(self) -> bool:  # type: ignore[override]
        return any(child.extend_dummy_seqs_capped_by_req_pool for child in self.serving(ForwardMode.EXTEND))

    @property
    def prefer_eager_mixed_prefill_under_dp_attention(self) -> bool:  # type: ignore[override]
        return any(child.prefer_eager_mixed_prefill_under_dp_attention for child in self.serving(ForwardMode.MIXED))

    @property
    def kv_index_translator(self) -> KVIndexTranslator | None:
        return next((leaf.kv_index_translator for leaf in self.leaves()), None)

    @kv_index_translator.setter
    def kv_index_translator(self, translator: KVIndexTranslator | None) -> None:
        for child in self._children:
            child.kv_index_translator = translator

    def close(self) -> None:
        for child in self._children:
            child.close()
