"""Every member of the contract with its scope and how a wrapper combines its children's: the table tests read."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Scope(str, Enum):
    """How long an answer of a member holds."""

    STEP = "step"
    LAYER = "layer"
    LIFETIME = "lifetime"


class Reducer(str, Enum):
    """How a wrapper answers from its children, always over those that serve the mode in question."""

    SELECT = "select"
    """The one child that mode, layer or stream names; at step scope a wrapper that routes by layer calls each."""
    EACH = "each"
    AND = "and"
    OR = "or"
    MIN = "min"
    MAX = "max"
    LATEST = "latest"
    JOIN = "join"
    """A composite of the children's."""
    OWN = "own"
    """The wrapper's own."""


class Member(NamedTuple):
    """One member of ``AttentionBackend``."""

    scope: Scope
    reducer: Reducer


_STEP, _LAYER, _LIFE = Scope.STEP, Scope.LAYER, Scope.LIFETIME

MEMBERS: dict[str, Member] = {
    "name": Member(_LIFE, Reducer.OWN),
    "spec": Member(_LIFE, Reducer.OWN),
    "env": Member(_LIFE, Reducer.OWN),
    "check_batch": Member(_STEP, Reducer.SELECT),
    "init_forward_metadata": Member(_STEP, Reducer.SELECT),
    "init_forward_metadata_out_graph": Member(_STEP, Reducer.SELECT),
    "init_forward_metadata_in_graph": Member(_STEP, Reducer.SELECT),
    "forward_metadata": Member(_STEP, Reducer.JOIN),
    "forward": Member(_LAYER, Reducer.SELECT),
    "forward_decode": Member(_LAYER, Reducer.SELECT),
    "forward_extend": Member(_LAYER, Reducer.SELECT),
    "forward_mixed": Member(_LAYER, Reducer.SELECT),
    "init_cuda_graph_state": Member(_LIFE, Reducer.EACH),
    "get_cuda_graph_seq_len_fill_value": Member(_LIFE, Reducer.MAX),
    "on_after_cuda_graph_warmup": Member(_LIFE, Reducer.EACH),
    "graph_level": Member(_LIFE, Reducer.MIN),
    "init_forward_metadata_for_breakable_cuda_graph_capture": Member(_STEP, Reducer.SELECT),
    "prepare_forward_metadata_for_breakable_cuda_graph_replay": Member(_STEP, Reducer.SELECT),
    "use_captured_forward_metadata_for_breakable_cuda_graph": Member(_LIFE, Reducer.AND),
    "prefill_cuda_graph_max_batch_size": Member(_LIFE, Reducer.MIN),
    "metadata_capture_refusal": Member(_LIFE, Reducer.JOIN),
    "shared_read_ends": Member(_LIFE, Reducer.LATEST),
    "needs_cpu_seq_lens": Member(_LIFE, Reducer.OR),
    "verify_mask": Member(_STEP, Reducer.SELECT),
    "update_verify_buffers_to_fill_after_draft": Member(_STEP, Reducer.SELECT),
    "supports_ragged_verify_graph": Member(_LIFE, Reducer.AND),
    "extend_dummy_seqs_capped_by_req_pool": Member(_LIFE, Reducer.OR),
    "prefer_eager_mixed_prefill_under_dp_attention": Member(_LIFE, Reducer.OR),
    "kv_index_translator": Member(_LIFE, Reducer.EACH),
    "attn_backend_list": Member(_LIFE, Reducer.OWN),
    "leaves": Member(_LIFE, Reducer.OWN),
    "unwrap": Member(_LAYER, Reducer.SELECT),
    "prefill_attention_backend_str": Member(_LIFE, Reducer.OWN),
    "decode_attention_backend_str": Member(_LIFE, Reducer.OWN),
    "indexer_metadata": Member(_LAYER, Reducer.SELECT),
    "commit_verify": Member(_STEP, Reducer.EACH),
    "close": Member(_LIFE, Reducer.EACH),
}
"""Public member → scope and reducer. A member of the base class that is not here fails a test, and so does one here
that a wrapper leaves at the base's default."""
