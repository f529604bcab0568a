"""Cross attention, encoders, MLA in its three forms, layers that differ, and what is refused."""

from __future__ import annotations

import pytest
import torch
from dense_world import F64, World, assert_exact, dense, layer

from attnplug.attention_io import AttentionExtras
from attnplug.errors import BackendRejected, ContractViolation
from attnplug.kv.write_loc import KVWriteLoc
from attnplug.layer import AttentionLayer
from attnplug.merge import merge_state
from attnplug.modes import AttentionType, ForwardMode, KVSpace, MlaForm
from attnplug.spec import Kind

CROSS = layer(is_cross_attention=True)
MLA = layer(kind=Kind.MLA, num_heads=4, num_kv_heads=1, head_dim=24, v_head_dim=16, kv_lora_rank=32, qk_rope_head_dim=8)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
@pytest.mark.parametrize("known", [True, False])
def test_cross_attention_reads_the_encoders_space(mode: ForwardMode, known: bool) -> None:
    new = (1, 1, 1, 1) if mode is ForwardMode.DECODE else (3, 1, 9, 2)
    world = World(CROSS, (3, 50, 9, 4), new, mode, encoder_lens=(40, 300, 0, 1))
    if not known:
        world.batch = world.batch.replace(encoder_lens_cpu=None)
    out, lse, _ = world.run(extras=AttentionExtras(return_lse=True))
    want, want_lse = world.expect()
    assert_exact(out, want)
    assert lse is not None
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_cross_attention_writes_new_encoder_rows() -> None:
    world = World(CROSS, (3, 2), (3, 2), encoder_lens=(40, 300))
    for buffer in world.pool.get_kv_buffer(0):
        buffer.fill_(float("nan"))
    loc = torch.cat(world.slots)
    plan = world.translator.plan(
        req_pool_indices=world.batch.req_pool_indices,
        out_cache_loc=world.batch.out_cache_loc,
        encoder_out_cache_loc=loc,
    )
    batch = world.batch.replace(kv_loc_plan=plan, encoder_out_cache_loc=loc)
    world.backend.init_forward_metadata(batch)
    out = world.backend.forward(world.q, torch.cat(world.k), torch.cat(world.v), world.module, batch).out
    assert_exact(out, world.expect()[0])


@pytest.mark.parametrize("window", [-1, 4])
def test_encoder_only_is_bidirectional_over_the_batchs_rows(window: int) -> None:
    spec = layer(attn_type=AttentionType.ENCODER_ONLY, sliding_window_size=window)
    world = World(layer(sliding_window_size=window), (7, 1, 40), (7, 1, 40))
    world.layer, world.module = spec, AttentionLayer.from_spec(spec)
    world.backend.init_forward_metadata(world.batch)
    out = world.backend.forward(world.q, torch.cat(world.k), torch.cat(world.v), world.module, world.batch).out
    assert_exact(out, world.expect()[0])


def absorbed(world: World, *, save: bool = True, lse: bool = False) -> object:
    rows = world.new_rows(world.k)[:, 0]
    extras = AttentionExtras(
        mla_form=MlaForm.ABSORBED,
        q_nope=world.q[..., :32],
        q_rope=world.q[..., 32:],
        latent=rows[:, :32],
        k_rope=rows[:, 32:],
        return_lse=lse,
    )
    world.backend.init_forward_metadata(world.batch)
    return world.backend.forward(world.q, None, None, world.module, world.batch, save, extras)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("runs", [True, False])
def test_absorbed_mla_attends_to_latent_rows(mode: ForwardMode, page_size: int, save: bool, runs: bool) -> None:
    new = (1, 1, 1) if mode is ForwardMode.DECODE else (5, 1, 100)
    world = World(MLA, (5, 40, 300), new, mode, page_size=page_size, runs=runs)
    out, lse, _ = absorbed(world, save=save, lse=True)
    want, want_lse = world.expect()
    assert_exact(out, want)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    assert_exact(absorbed(world, save=save).out, want)


def test_absorbed_mla_reads_fp8_latents_with_one_scale() -> None:
    world = World(MLA, (5, 40, 300), (5, 1, 100), kv_dtype=torch.float8_e4m3fn, k_scale=0.25, v_scale=0.25)
    assert_exact(absorbed(world).out, world.expect()[0])


def test_expanded_mla_over_a_prefix_in_chunks_equals_attention_in_one() -> None:
    """One-shot over the new rows, two chunks over the prefix, merged by LSE, and the latents stored on the way."""
    g = torch.Generator().manual_seed(1)
    lens, new, h = (9, 40, 30), (9, 10, 2), 4
    world = World(MLA, lens, new)
    q = torch.randn(sum(new), h, 24, generator=g, dtype=F64)
    k = [torch.randn(n, h, 24, generator=g, dtype=F64) for n in lens]
    v = [torch.randn(n, h, 16, generator=g, dtype=F64) for n in lens]
    rows = world.new_rows(world.k)[:, 0]
    world.backend.init_forward_metadata(world.batch)

    def call(form: MlaForm, k: torch.Tensor, v: torch.Tensor, save: bool, **kw: object) -> tuple:
        extras = AttentionExtras(mla_form=form, return_lse=True, **kw)
        out, lse, _ = world.backend.forward(q, k, v, world.module, world.batch, save, extras)
        return out, lse

    own_k = torch.cat([x[n - t :] for x, n, t in zip(k, lens, new, strict=True)])
    own_v = torch.cat([x[n - t :] for x, n, t in zip(v, lens, new, strict=True)])
    out, lse = call(MlaForm.ONE_SHOT, own_k, own_v, True, latent=rows[:, :32], k_rope=rows[:, 32:])
    done = (0, 0, 0)
    for part in ((0, 16, 28), (0, 14, 0)):
        ends = tuple(a + b for a, b in zip(done, part, strict=True))
        chunk_k = torch.cat([x[a:b] for x, a, b in zip(k, done, ends, strict=True)])
        chunk_v = torch.cat([x[a:b] for x, a, b in zip(v, done, ends, strict=True)])
        indptr = torch.tensor([0, part[0], part[0] + part[1], sum(part)])
        more = call(MlaForm.CHUNKED_PREFIX, chunk_k, chunk_v, False, chunk_indptr=indptr, chunk_lens_cpu=part)
        out, lse = merge_state(out, lse, *more)
        done = ends
    row = 0
    for i, t in enumerate(new):
        n = lens[i]
        seen = torch.arange(n)[None] <= torch.arange(n - t, n)[:, None]
        want, want_lse = dense(q[row : row + t], k[i], v[i], seen, scale=MLA.scaling)
        torch.testing.assert_close(out[row : row + t], want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[row : row + t].double(), want_lse, rtol=1e-5, atol=1e-5)
        row += t
    stored = world.pool.get_kv_buffer(0)[0]
    written = KVWriteLoc.for_layer(world.batch, world.module).slots
    assert torch.equal(stored[written, 0], rows)


def test_group_size_sixteen_and_odd_widths() -> None:
    spec = layer(num_heads=32, num_kv_heads=2, head_dim=72, v_head_dim=40)
    world = World(spec, (40, 300), (1, 1), ForwardMode.DECODE)
    assert_exact(world.run().out, world.expect()[0])


REFUSED = {
    "wrong_q": ({"q": torch.zeros(5, 4, 8)}, "q: asked"),
    "only_k": ({"v": None}, "only k"),
    "wrong_v": ({"v": torch.zeros(5, 2, 3)}, "v: asked"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_call_that_cannot_be_answered_is_refused_before_any_write(case: str) -> None:
    world = World(layer(), (5,), (5,))
    changes, words = REFUSED[case]
    call = {"q": world.q, "k": world.new_rows(world.k), "v": world.new_rows(world.v), **changes}
    world.backend.init_forward_metadata(world.batch)
    with pytest.raises(BackendRejected, match=words):
        world.backend.forward(call["q"], call["k"], call["v"], world.module, world.batch)
    assert torch.isnan(world.pool.get_kv_buffer(0)[0]).all()


def test_all_faults_of_a_call_are_told_at_once() -> None:
    world = World(layer(), (5,), (5,))
    world.backend.init_forward_metadata(world.batch)
    with pytest.raises(BackendRejected) as error:
        world.backend.forward(torch.zeros(5, 4, 8), torch.zeros(5, 1, 16), None, world.module, world.batch)
    assert len(error.value.reasons["torch_native"]) == 3


def test_mla_without_a_form_is_refused() -> None:
    world = World(MLA, (5,), (5,))
    with pytest.raises(BackendRejected, match="mla_form"):
        world.run()


def test_window_in_cross_attention_is_refused() -> None:
    world = World(layer(is_cross_attention=True, sliding_window_size=4), (5,), (5,), encoder_lens=(3,))
    with pytest.raises(BackendRejected, match="encoder positions"):
        world.run()


def test_layer_that_the_model_does_not_have_is_refused() -> None:
    world = World(layer(), (5,), (5,))
    world.backend.init_forward_metadata(world.batch)
    other = AttentionLayer.from_spec(layer(sliding_window_size=3))
    with pytest.raises(ContractViolation, match="no plan"):
        world.backend.forward(world.q, None, None, other, world.batch)


def test_layer_before_metadata_is_refused() -> None:
    world = World(layer(), (5,), (5,))
    with pytest.raises(ContractViolation, match="before its metadata"):
        world.backend.forward(world.q, None, None, world.module, world.batch)


def test_space_that_has_no_table_is_refused() -> None:
    world = World(CROSS, (5,), (5,), encoder_lens=(3,))
    world.translator._tables.pop(KVSpace.ENCODER)
    with pytest.raises(ContractViolation, match="encoder"):
        world.run()
