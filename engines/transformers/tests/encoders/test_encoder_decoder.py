"""Requests with an encoder: encoded once, in pages of their own, whatever else happens to them."""

from __future__ import annotations

import pytest
import torch
from family_zoo import NEW_TOKENS, tokens_of

from attnplug.modes import AttentionType, ForwardMode, KVSpace
from attnplug_torch_native.backend import TorchNativeBackend
from attnplug_transformers import SamplingParams


class Recorder(TorchNativeBackend):
    """torch_native, with what its layers were asked."""

    def __init__(self, env):
        super().__init__(env)
        self.calls = []

    def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True, extras=None):
        if layer.is_cross_attention:
            self.calls.append(("cross", batch.forward_mode, None if k is None else k.shape[0], save_kv_cache))
        elif layer.attn_type is AttentionType.ENCODER_ONLY:
            self.calls.append(("encoder", batch.forward_mode, k.shape[0], None))
        return super().forward_extend(q, k, v, layer, batch, save_kv_cache, extras)


def all_free(engine) -> bool:
    pages = (engine.pages, engine.encoder_pages)
    return all(one.num_free == one.num_pages for one in pages) and not engine.has_work


def encoder_rows(engine) -> int:
    layers = [one for one in engine.model_spec.layers if one.attn_type is AttentionType.ENCODER_ONLY]
    return sum(call[2] for call in engine.backend.calls if call[0] == "encoder") // len(layers)


def test_each_encoder_runs_once_and_its_keys_are_written_once_and_then_reused(bart, serve):
    engine = serve(bart.model, backend_factory=Recorder)
    assert tokens_of(engine.generate(bart.inputs, NEW_TOKENS)) == bart.tokens
    total = sum(len(one["input_ids"]) for one in bart.inputs)
    assert encoder_rows(engine) == total
    crossing = [call for call in engine.backend.calls if call[0] == "cross"]
    layers = sum(one.is_cross_attention for one in engine.model_spec.layers)
    assert sum(rows or 0 for _, _, rows, _ in crossing) == total * layers
    assert {(rows is None, saved) for _, _, rows, saved in crossing} == {(True, False), (False, True)}
    assert all(rows is None for _, mode, rows, _ in crossing if mode is ForwardMode.DECODE)
    assert all_free(engine)


def test_the_two_spaces_hold_each_their_layers(bart, serve):
    engine = serve(bart.model)
    pool = engine.backend.env.kv_pool
    spaces = [pool.space_of(one.layer_id) for one in engine.model_spec.layers if one.reads_pool]
    assert spaces == [KVSpace.FULL] * 3 + [KVSpace.ENCODER] * 3
    assert engine.encoder_pages.num_pages == engine.sizes.num_encoder_pages


@pytest.mark.parametrize("max_batch_size", [1, 3, 8])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_tokens_depend_on_neither_the_batch_nor_the_page_size(bart, serve, max_batch_size, page_size):
    engine = serve(bart.model, page_size=page_size, max_batch_size=max_batch_size, chunk_size=5)
    assert tokens_of(engine.generate(bart.inputs, NEW_TOKENS)) == bart.tokens


def test_new_requests_join_while_others_decode_in_mixed_steps(bart, serve):
    engine = serve(bart.model, backend_factory=Recorder)
    tokens, waiting, ids = {}, list(bart.inputs), []
    while waiting or engine.has_work:
        if waiting:
            ids.append(engine.add_request(waiting.pop(0), NEW_TOKENS))
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert [tokens[one] for one in ids] == bart.tokens
    assert ForwardMode.MIXED in {mode for kind, mode, rows, _ in engine.backend.calls if kind == "cross" and rows}


def test_a_backend_without_mixed_steps_takes_turns(bart, serve):
    class Unmixed(Recorder):
        def __init__(self, env):
            super().__init__(env)
            self.spec = self.spec.replace(modes=self.spec.modes - {"mixed"})

    engine = serve(bart.model, backend_factory=Unmixed, chunk_size=5)
    assert tokens_of(engine.generate(bart.inputs, NEW_TOKENS)) == bart.tokens
    assert {mode for _, mode, _, _ in engine.backend.calls} == {ForwardMode.EXTEND, ForwardMode.DECODE}


def test_a_preempted_request_keeps_its_encoders_keys(bart, serve):
    engine = serve(bart.model, backend_factory=Recorder, page_size=1, num_pages=70, num_encoder_pages=400)
    assert tokens_of(engine.generate(bart.inputs, NEW_TOKENS)) == bart.tokens
    assert engine.scheduler.num_preemptions > 0
    assert encoder_rows(engine) == sum(len(one["input_ids"]) for one in bart.inputs), "nothing was encoded twice"
    assert all_free(engine)


def test_requests_wait_for_pages_of_the_encoder_space(bart, serve):
    engine = serve(bart.model, num_pages=200, num_encoder_pages=10)
    assert tokens_of(engine.generate(bart.inputs, NEW_TOKENS)) == bart.tokens
    assert engine.scheduler.num_preemptions == 0
    assert all_free(engine)


def test_a_step_takes_as_many_encoder_rows_as_tokens_but_always_one_input(bart, serve):
    engine = serve(bart.model, backend_factory=Recorder, max_num_tokens=256)
    assert engine.sizes.max_encoder_rows == 256
    for one in [*bart.inputs, *bart.inputs]:
        engine.add_request(one, 1)
    engine.step()
    assert 200 < encoder_rows(engine) <= 256


def test_aborted_requests_give_back_pages_of_both_spaces_also_while_they_wait_preempted(bart, serve):
    engine = serve(bart.model, page_size=1, num_pages=70, num_encoder_pages=400)
    ids = [engine.add_request(one, NEW_TOKENS) for one in bart.inputs]
    while not engine.scheduler.num_preemptions:
        engine.step()
    kept = [one for one in engine.scheduler.waiting if one.encoder_pages]
    assert kept
    assert not kept[0].pages
    reasons = {}
    assert engine.abort(kept[0].request_id)
    for one in ids:
        engine.abort(one)
    while engine.has_work:
        reasons |= {output.request_id: output.finish_reason for output in engine.step()}
    assert reasons[kept[0].request_id] == "abort"
    assert all_free(engine)


def test_a_step_that_raises_leaves_a_usable_engine_and_no_hook(bart, serve):
    class Faulty(TorchNativeBackend):
        faults = 1

        def forward_extend(self, *args, **kwargs):
            if self.faults and args[3].is_cross_attention:
                self.faults -= 1
                raise RuntimeError("a kernel failed")
            return super().forward_extend(*args, **kwargs)

    engine = serve(bart.model, backend_factory=Faulty)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        engine.generate(bart.inputs, NEW_TOKENS)
    engine.step()
    assert all_free(engine)
    assert not any(module._forward_pre_hooks for module in bart.model.modules())
    assert tokens_of(engine.generate(bart.inputs, NEW_TOKENS)) == bart.tokens


def test_the_model_computes_as_before_between_steps(bart, serve):
    ids = torch.tensor([bart.inputs[2]["input_ids"]])
    with torch.no_grad():
        before = bart.model(ids).logits
        engine = serve(bart.model)
        engine.add_request(bart.inputs[1], 4)
        engine.step()
        assert torch.equal(bart.model(ids).logits, before)


def test_a_stream_and_seeded_sampling_give_what_generate_gives(bart, serve):
    engine = serve(bart.model)
    params = SamplingParams(temperature=30.0, top_p=0.9, seed=7)
    whole = tokens_of(engine.generate(bart.inputs, NEW_TOKENS, params))
    assert whole != bart.tokens
    tokens = [[] for _ in bart.inputs]
    for chunk in engine.generate_stream(bart.inputs, NEW_TOKENS, params):
        tokens[chunk.index] += chunk.token_ids
    assert tokens == whole
    stream = engine.generate_stream(bart.inputs, NEW_TOKENS)
    next(stream)
    stream.close()
    engine.step()
    assert all_free(engine)


def test_whispers_features_come_as_tensors_mappings_or_one_batch(whisper, serve):
    engine = serve(whisper.model)
    assert tokens_of(engine.generate(whisper.inputs, NEW_TOKENS)) == whisper.tokens
    features = [one["input_features"] for one in whisper.inputs]
    plain = tokens_of(engine.generate(features, NEW_TOKENS))
    assert plain == tokens_of(engine.generate(torch.stack(features), NEW_TOKENS))
    assert plain == tokens_of(engine.generate([{"input_features": one[None]} for one in features], NEW_TOKENS))
    assert plain[0] == whisper.tokens[0], "the first begins with the start token alone"


def test_tokens_of_barts_own_generate_with_the_start_of_the_generation_config(bart, serve):
    texts = [one["input_ids"] for one in bart.inputs]
    want = []
    for text in texts:
        ids = torch.tensor([text])
        out = bart.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1
        )
        want.append(out[0, 1:].tolist())
    assert tokens_of(serve(bart.model).generate(texts, NEW_TOKENS)) == want


def test_a_forced_first_token_is_part_of_what_the_decoder_begins_with(bart, serve, monkeypatch):
    monkeypatch.setattr(bart.model.generation_config, "forced_bos_token_id", 7)
    text = bart.inputs[2]["input_ids"]
    ids = torch.tensor([text])
    out = bart.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS + 1, do_sample=False, num_beams=1
    )
    assert out[0, :2].tolist() == [2, 7]
    assert tokens_of(serve(bart.model).generate([text], NEW_TOKENS)) == [out[0, 2:].tolist()]
