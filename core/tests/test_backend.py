"""What the base class does for every backend: dispatch, idle, and refusal before any kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug.attention_io import AttentionExtras, AttentionOutput
from attnplug.backend import AttentionBackend
from attnplug.errors import BackendRejected
from attnplug.layer import AttentionLayer
from attnplug.modes import ForwardMode, MlaForm
from attnplug.spec import BackendSpec, Dims, Feature, Kind

from .batches import decode_batch, extend_batch
from .spike_world import LIBRARY_SPEC, World


class Recording(AttentionBackend):
    """Says which of its methods ran."""

    def __init__(self, spec: BackendSpec = LIBRARY_SPEC) -> None:
        super().__init__(spec, World().env)
        self.ran: list[str] = []

    def _ran(self, name: str, q: Tensor) -> AttentionOutput:
        self.ran.append(name)
        return AttentionOutput(q)

    def forward_decode(self, q: Tensor, *args: Any) -> AttentionOutput:
        return self._ran("decode", q)

    def forward_extend(self, q: Tensor, *args: Any) -> AttentionOutput:
        return self._ran("extend", q)

    def forward_mixed(self, q: Tensor, *args: Any) -> AttentionOutput:
        return self._ran("mixed", q)

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        self.ran.append("out_graph")

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        self.ran.append("in_graph")


LAYER = AttentionLayer(4, 8, 1.0, 2, 0, v_head_dim=8)
Q = torch.ones(2, 4, 8)


def test_modes_reach_the_right_method() -> None:
    backend, q = Recording(), Q
    backend.forward(q, None, None, LAYER, decode_batch([1, 1]))
    backend.forward(q, None, None, LAYER, extend_batch([0], [2]))
    backend.forward(q, None, None, LAYER, extend_batch([0, 3], [1, 1], forward_mode=ForwardMode.MIXED))
    assert backend.ran == ["decode", "extend", "extend"]
    native = Recording(LIBRARY_SPEC.replace(native_mixed=True, modes=LIBRARY_SPEC.modes | {ForwardMode.MIXED}))
    native.forward(q, None, None, LAYER, extend_batch([0, 3], [1, 1], forward_mode=ForwardMode.MIXED))
    assert native.ran == ["mixed"]


def test_the_eager_entry_runs_both_parts_in_order() -> None:
    backend = Recording()
    backend.init_forward_metadata(decode_batch([1]))
    assert backend.ran == ["out_graph", "in_graph"]


def test_idle_gives_zeros_of_the_right_shape_and_runs_nothing() -> None:
    backend = Recording(LIBRARY_SPEC.replace(features=LIBRARY_SPEC.features | {Feature.V_HEAD_DIM, Feature.LSE}))
    layer = AttentionLayer(4, 8, 1.0, 2, 0, v_head_dim=6)
    batch = decode_batch([], forward_mode=ForwardMode.IDLE)
    out = backend.forward(torch.empty(3, 4, 8), None, None, layer, batch, extras=AttentionExtras(return_lse=True))
    assert out.out.shape == (3, 4, 6)
    assert bool((out.out == 0).all())
    assert out.lse is not None
    assert out.lse.tolist() == [[float("-inf")] * 4] * 3
    assert backend.ran == []


def test_an_fp8_query_gives_a_bfloat16_output() -> None:
    batch = decode_batch([], forward_mode=ForwardMode.IDLE)
    q = torch.empty(1, 4, 8).to(torch.float8_e4m3fn)
    assert Recording().forward(q, None, None, LAYER, batch).out.dtype == torch.bfloat16


UNDECLARED = {
    "sinks": AttentionLayer(4, 8, 1.0, 2, 0, sinks=torch.zeros(4)),
    "softcap": AttentionLayer(4, 8, 1.0, 2, 0, logit_cap=5.0),
    "v_head_dim": AttentionLayer(4, 8, 1.0, 2, 0, v_head_dim=6),
    "kv_scales": AttentionLayer(4, 8, 1.0, 2, 0, k_scale=0.5),
    "cross_attention": AttentionLayer(4, 8, 1.0, 2, 0, is_cross_attention=True),
    "kinds": AttentionLayer(4, 8, 1.0, 4, 0, kind=Kind.MLA, kv_lora_rank=4, qk_rope_head_dim=2),
}


@pytest.mark.parametrize("field", UNDECLARED)
def test_what_a_layer_asks_and_the_spec_lacks_is_refused_before_any_kernel(field: str) -> None:
    backend = Recording()
    with pytest.raises(BackendRejected) as caught:
        backend.forward(Q, None, None, UNDECLARED[field], decode_batch([1, 1]))
    assert field in [reason.field for reason in caught.value.reasons["library"]]
    assert backend.ran == []


@pytest.mark.parametrize("extras", [AttentionExtras(return_lse=True), AttentionExtras(mla_form=MlaForm.ABSORBED)])
def test_what_a_call_asks_and_the_spec_lacks_is_refused(extras: AttentionExtras) -> None:
    backend = Recording()
    with pytest.raises(BackendRejected, match="not declared"):
        backend.forward(Q, None, None, LAYER, decode_batch([1, 1]), extras=extras)
    assert backend.ran == []


@pytest.mark.parametrize(
    ("batch", "field"),
    [
        (
            decode_batch(
                [1],
                forward_mode=ForwardMode.DRAFT_EXTEND,
                **{
                    k: getattr(extend_batch([0], [1]), k)
                    for k in (
                        "extend_seq_lens",
                        "extend_prefix_lens",
                        "extend_start_loc",
                        "extend_seq_lens_cpu",
                        "extend_num_tokens",
                    )
                },
            ),
            "modes",
        ),
        (decode_batch([1] * 7), "max_batch_size"),
        (extend_batch([0], [145]), "max_num_tokens"),
        (decode_batch([25]), "max_context_len"),
        (decode_batch([1], seq_lens_cpu=None), "seq_lens_cpu"),
    ],
    ids=["mode", "requests", "tokens", "context", "mirror"],
)
def test_a_batch_beyond_the_declaration_is_refused_before_metadata(batch: Any, field: str) -> None:
    backend = Recording()
    with pytest.raises(BackendRejected) as caught:
        backend.init_forward_metadata(batch)
    assert field in [reason.field for reason in caught.value.reasons["library"]]
    assert backend.ran == []


def test_extras_are_narrowed_by_what_their_rows_are() -> None:
    extras = AttentionExtras(q_rope=torch.arange(4), k_rope=torch.arange(10, 16), return_lse=True)
    part = extras.narrow(slice(1, 3), slice(2, 6))
    assert part.q_rope is not None
    assert part.k_rope is not None
    assert part.q_rope.tolist() == [1, 2]
    assert part.k_rope.tolist() == [12, 13, 14, 15]
    assert part.return_lse


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_kv_heads": 3}, "multiple of num_kv_heads 3"),
        ({"sinks": torch.zeros(3)}, r"allowed: \(4,\)"),
        ({"logit_capping_method": "sigmoid"}, "allowed: 'tanh'"),
    ],
    ids=["heads", "sinks", "method"],
)
def test_an_impossible_layer_is_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionLayer(**{"num_heads": 4, "head_dim": 8, "scaling": 1.0, "num_kv_heads": 2, "layer_id": 0, **kwargs})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"device_types": frozenset({"cuda"})}, "device_types"),
        ({"dtypes": frozenset({"bfloat16"})}, "dtypes"),
        ({"kv_dtypes": frozenset({"bfloat16"})}, "kv_dtypes"),
        ({"kv_layouts": frozenset({"HND"})}, "kv_layouts"),
        ({"page_sizes": Dims(values=(256,))}, "page_sizes"),
        ({"max_context_len": 1}, "max_context_len"),
        ({"features": frozenset({Feature.SLIDING_WINDOW})}, "heterogeneous_layers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_backend_built_by_hand_refuses_an_environment_it_does_not_declare(changes: Any, field: str) -> None:
    with pytest.raises(BackendRejected) as caught:
        Recording(LIBRARY_SPEC.replace(**changes))
    assert [reason.field for reason in caught.value.reasons["library"]] == [field]


def test_an_environment_that_asks_for_determinism_is_refused_where_it_is_not_declared() -> None:
    with pytest.raises(BackendRejected, match="deterministic"):
        AttentionBackend(LIBRARY_SPEC, World().env.replace(deterministic=True))
