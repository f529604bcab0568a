"""The contract of a backend: compile one batch's metadata, then run one family of kernels, a layer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .assembly.env import BackendEnv
from .attention_io import AttentionExtras, AttentionOutput
from .batch import ForwardBatch
from .errors import ContractViolation
from .kv.translator import KVIndexTranslator
from .layer import AttentionLayer, output_dtype
from .masks.verify import VerifyMask
from .modes import ForwardMode, GraphLevel, MlaForm, SharedReadEnds
from .refusal import refuse_batch, refuse_env, refuse_extras, refuse_layer
from .spec import BackendSpec
from .spec_info import SpecInfo


class AttentionBackend:
    """Base of every backend. Four faces: metadata, execution, graphs, declarations.

    A backend never writes to the batch, to the caller's q, k and v, nor to the environment. How a wrapper combines its
    children's members stands in ``attnplug.members``.

    Args:
        spec: What was declared; whatever it leaves out is refused here, before any kernel.
        env: Where the backend runs.

    Raises:
        BackendRejected: The spec does not cover the environment: device, dtypes, layout, page size, shapes of layers.
    """

    forward_metadata: Any = None
    """This step's compiled object; can be snapshot and restored."""
    needs_cpu_seq_lens: bool = True
    """Whether decode and verify steps read ``seq_lens_cpu``; extend steps always bring it."""
    use_captured_forward_metadata_for_breakable_cuda_graph: bool = False
    prefill_cuda_graph_max_batch_size: int | None = None
    """Most requests of a captured prefill; None: no bound of its own."""
    supports_ragged_verify_graph: bool = False
    """Whether a captured verify may hold requests with fewer drafts than the window."""
    extend_dummy_seqs_capped_by_req_pool: bool = False
    """Whether a dummy extend batch may hold no more requests than the request pool has rows."""
    prefer_eager_mixed_prefill_under_dp_attention: bool = False
    """Whether a mixed prefill stays out of graphs when ranks attend to different requests."""
    verify_mask: VerifyMask | None = None
    """The mask that drafting fills in place; None where this backend cannot verify."""
    kv_index_translator: KVIndexTranslator | None = None
    """Through which all reads go; set or verified when backends are put together."""
    prefill_attention_backend_str: str = ""
    decode_attention_backend_str: str = ""

    def __init__(self, spec: BackendSpec, env: BackendEnv) -> None:
        self.spec, self.env = spec, env
        refuse_env(spec, env)
        self.needs_cpu_seq_lens = spec.needs_cpu_seq_lens
        self._admitted: dict[int, AttentionLayer] = {}

    @property
    def name(self) -> str:
        """The backend's identity."""
        return self.spec.name

    @property
    def graph_level(self) -> GraphLevel:
        """Which batches may be captured."""
        return self.spec.graph_level

    # Metadata

    def check_batch(self, batch: ForwardBatch) -> None:
        """Refuse a batch that the spec does not cover; host work only.

        Raises:
            BackendRejected: With every reason.
        """
        refuse_batch(self.name, self.spec, self.env, batch, reads_cpu_lens=self.needs_cpu_seq_lens)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Compile a step's metadata, eagerly: both parts in order.

        Raises:
            BackendRejected: The spec does not cover the batch.
        """
        self.check_batch(batch)
        self.init_forward_metadata_out_graph(batch)
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Do the host work and dynamic shapes of a step's metadata, once a step, outside any capture.

        Args:
            batch: The step.
            in_capture: A capture follows; read only where capture and replay really differ.
        """
        raise NotImplementedError(f"{type(self).__name__} must compile metadata")

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Do the static-shape device work of a step's metadata: recorded once, replayed, never synchronising."""

    # Execution

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
        """Run one layer.

        Args:
            q: [T, Hq, D], the model's dtype; absorbed MLA reads extras.q_nope and q_rope and takes any [T, Hq, …].
            k: [T, Hk, D] new keys; None where they are in the pool already.
            v: [T, Hk, Dv] likewise.
            layer: Heads, semantics, scales.
            batch: The step that the metadata was compiled for.
            save_kv_cache: Write k and v to the layer's space first.
            extras: Optional inputs.

        Returns:
            out [T, Hq, Dv] (absorbed MLA: [T, Hq, C]) in the model's dtype; idle gives zeros, and no kernel runs.

        Raises:
            BackendRejected: The spec does not cover the layer or what the extras ask; before any kernel.
        """
        if self._admitted.get(layer.layer_id) is not layer:
            refuse_layer(self.name, self.spec, layer.spec)
            self._admitted[layer.layer_id] = layer
        if extras is not None:
            refuse_extras(self.name, self.spec, extras)
        mode = batch.forward_mode
        if mode is ForwardMode.DECODE:
            return self.forward_decode(q, k, v, layer, batch, save_kv_cache, extras)
        if mode is ForwardMode.IDLE:
            return self._idle(q, v, layer, extras)
        if mode is ForwardMode.MIXED and self.spec.native_mixed:
            return self.forward_mixed(q, k, v, layer, batch, save_kv_cache, extras)
        return self.forward_extend(q, k, v, layer, batch, save_kv_cache, extras)

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
        """Run one layer of a decode step; see ``forward``."""
        raise NotImplementedError(f"{type(self).__name__} has no decode")

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        extras: AttentionExtras | None = None,
    ) -> AttentionOutput:
        """Run one layer of any step with several queries a request; see ``forward``."""
        raise NotImplementedError(f"{type(self).__name__} has no extend")

    def forward_mixed(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        extras: AttentionExtras | None = None,
    ) -> AttentionOutput:
        """Run one layer of a mixed step; called if and only if the spec says ``native_mixed``."""
        raise NotImplementedError(f"{type(self).__name__} has no mixed forward of its own")

    def _idle(
        self, q: Tensor, v: Tensor | None, layer: AttentionLayer, extras: AttentionExtras | None
    ) -> AttentionOutput:
        absorbed = extras is not None and extras.mla_form is MlaForm.ABSORBED
        width = layer.kv_lora_rank if absorbed else layer.v_head_dim
        out = torch.zeros((q.shape[0], layer.num_heads, width), dtype=output_dtype(q, v), device=q.device)
        if extras is None or not extras.return_lse:
            return AttentionOutput(out)
        lse = torch.full((q.shape[0], layer.num_heads), float("-inf"), dtype=torch.float32, device=q.device)
        return AttentionOutput(out, lse)

    # Graphs

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate, once, every buffer of fixed address, for the largest batch; initialised.

        Raises:
            ContractViolation: This backend serves no graph.
        """
        raise ContractViolation(
            f"backend {self.name!r} serves no graphs: graph_level is {self.graph_level.name}",
            remedy="set graphs = 'off', or choose a backend with a graph level",
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return a small legal length for padding rows."""
        return 1

    def on_after_cuda_graph_warmup(self) -> None:
        """Undo what warm-up changed."""

    def init_forward_metadata_for_breakable_cuda_graph_capture(self, batch: ForwardBatch) -> Any:
        """Make metadata whose tensors a broken-up graph may read; opt-in."""
        raise ContractViolation(
            f"backend {self.name!r} does not let captured metadata cross graph breaks",
            remedy="rebuild metadata at each replay: use_captured_forward_metadata_for_breakable_cuda_graph is False",
        )

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(
        self, captured: Any, batch: ForwardBatch, *, static_forward_batch: ForwardBatch | None = None
    ) -> None:
        """Refresh captured metadata in place for this step; opt-in."""
        raise ContractViolation(
            f"backend {self.name!r} does not let captured metadata cross graph breaks",
            remedy="rebuild metadata at each replay: use_captured_forward_metadata_for_breakable_cuda_graph is False",
        )

    def metadata_capture_refusal(self, mode: ForwardMode) -> str:
        """Return why metadata preparation may not itself be captured; empty where it may."""
        return f"{self.name} has not said that its metadata preparation can be captured"

    # Declarations

    def shared_read_ends(self, mode: ForwardMode) -> SharedReadEnds:
        """Return where this backend stops reading tensors that the scheduler overwrites; an early answer is earned."""
        return SharedReadEnds.UNKNOWN

    def update_verify_buffers_to_fill_after_draft(self, spec_info: SpecInfo, bs: int) -> None:
        """Redo what depends on the draft tree, after drafting filled the mask. Nothing where nothing depends on it."""

    def indexer_metadata(self, layer_id: int, batch: ForwardBatch) -> Any:
        """Return what a sparse layer's indexer needs of this step."""
        raise ContractViolation(f"backend {self.name!r} has no indexer for layer {layer_id}")

    def commit_verify(self, accepted_steps: Tensor, batch: ForwardBatch) -> None:
        """Keep the accepted step's state, [B] int64 device; nothing for backends without state."""

    # Composition

    @property
    def attn_backend_list(self) -> Sequence[AttentionBackend]:
        """A wrapper's children; a leaf has none."""
        return ()

    def leaves(self) -> Iterator[AttentionBackend]:
        """Yield the backends without children, each once."""
        yield self

    def unwrap(self, layer_id: int, mode: ForwardMode) -> AttentionBackend:
        """Return the leaf that serves a layer in a mode."""
        return self

    def close(self) -> None:
        """Give back workspaces; the backend is not used afterwards."""
