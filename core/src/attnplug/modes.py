"""The words a batch and a backend use about one step: standard library only, so that specs may name them."""

from __future__ import annotations

from enum import Enum, IntEnum


class ForwardMode(str, Enum):
    """What the queries of a batch are; see ``docs/contract.md`` for what ``seq_lens`` counts in each."""

    EXTEND = "extend"
    """New tokens, perhaps after a cached prefix; chunked prefill too. Causal, bottom-right."""
    DECODE = "decode"
    """One new token a request; ``seq_lens`` includes it."""
    MIXED = "mixed"
    """Extend rows together with one-token rows."""
    IDLE = "idle"
    """No request; or padding rows that must join collectives."""
    TARGET_VERIFY = "target_verify"
    """``draft_token_num`` drafted tokens a request, chain or tree; ``seq_lens`` excludes them."""
    DRAFT_EXTEND = "draft_extend"
    """Accepted tokens at a fixed width a request; ``seq_lens`` includes them."""
    SPLIT_PREFILL = "split_prefill"
    """As EXTEND, but a call of the model runs only some of its layers."""
    DLLM_EXTEND = "dllm_extend"
    """A block of a diffusion language model: bidirectional inside the block, after a cached prefix."""

    @property
    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    @property
    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    @property
    def is_extend(self) -> bool:
        """Whether the rows of a request are described by ``extend_seq_lens`` and ``extend_prefix_lens``."""
        return self not in (ForwardMode.DECODE, ForwardMode.IDLE, ForwardMode.TARGET_VERIFY)

    @property
    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY

    @property
    def phase(self) -> Phase:
        """The deployment phase that usually serves this mode; target-verify is routed by configuration instead."""
        if self.is_decode_or_idle:
            return Phase.DECODE
        return Phase.VERIFY if self.is_target_verify else Phase.PREFILL


class Phase(str, Enum):
    """A side of a deployment that a backend can be chosen for."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


class SharedReadEnds(IntEnum):
    """Where in a step a backend stops reading tensors that the scheduler may overwrite; later compares greater."""

    PRE_REPLAY = 1
    """After ``init_forward_metadata_out_graph``."""
    IN_REPLAY = 2
    """After ``init_forward_metadata_in_graph``."""
    POST_REPLAY = 3
    """When the forward has ended: kernels read shared rows themselves."""
    UNKNOWN = 4
    """Not audited: the scheduler must wait for the whole step."""


class AttentionType(str, Enum):
    """Which keys a layer's queries may see, before windows and masks."""

    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    """Cached like a decoder's, without causality."""
    ENCODER_ONLY = "encoder_only"
    """Bidirectional over the rows of the batch; nothing is read from a pool."""


class KVSpace(str, Enum):
    """An id space of KV slots. A slot id means nothing outside its space."""

    FULL = "full"
    WINDOW = "window"
    ENCODER = "encoder"


class GraphLevel(IntEnum):
    """Which batches a backend can serve from a captured graph; the minimum over a composite's children holds."""

    NONE = 0
    DECODE = 1
    """One query a request."""
    UNIFORM = 2
    """The same number of queries for each request: decode and verify."""
    ALWAYS = 3
    """Any batch."""


class MlaForm(str, Enum):
    """In which algebraic form a multi-head-latent-attention layer is computed."""

    ABSORBED = "absorbed"
    """Queries projected into the latent space; keys and values are the latent rows of the pool."""
    ONE_SHOT = "one_shot"
    """Expanded heads over the rows of this batch only; no cached prefix."""
    CHUNKED_PREFIX = "chunked_prefix"
    """Expanded heads over one gathered chunk of the cached prefix; not causal; merged by LSE."""
