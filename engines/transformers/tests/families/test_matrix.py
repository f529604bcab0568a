"""In float32 every family's tokens are those of dense eager attention, in every page size with every chunk size."""

from __future__ import annotations

import pytest
import torch
from family_zoo import (
    BATCH_SIZES,
    CHUNK_SIZES,
    ENCODERS,
    GENERATING,
    NATIVE,
    NEW_TOKENS,
    PAGE_SIZES,
    PROMPT_LENS,
    WINDOW,
    dense_logits,
    make_case,
    tokens_of,
)

from attnplug_transformers import Encoder, Engine

CELLS = [(page, chunk) for page in PAGE_SIZES for chunk in CHUNK_SIZES]


@pytest.mark.parametrize("subject", GENERATING, ids=lambda one: one.name)
def test_tokens_are_those_of_dense_eager_attention(subject):
    case = make_case(subject)
    assert len({token for tokens in case.tokens for token in tokens}) > 8, "an oracle that repeats itself proves little"
    assert len({tuple(tokens) for tokens in case.tokens}) == len(case.inputs), "tokens do not depend on the input"
    assert max(PROMPT_LENS) > 8 * WINDOW
    wrong = []
    for place, (page_size, chunk_size) in enumerate(CELLS):
        # Each size of batch meets each page size and each chunk size.
        batch = BATCH_SIZES[(place + place // len(CHUNK_SIZES)) % len(BATCH_SIZES)]
        options = {"num_pages": 500, "max_batch_size": batch, "check_batches": True}
        with Engine(case.model, attention=NATIVE, page_size=page_size, chunk_size=chunk_size, **options) as engine:
            if tokens_of(engine.generate(case.inputs, NEW_TOKENS)) != case.tokens:
                wrong.append((page_size, chunk_size, batch))
            assert engine.pages.num_free == engine.pages.num_pages
    assert not wrong


@pytest.mark.parametrize("subject", ENCODERS, ids=lambda one: one.name)
@pytest.mark.parametrize("max_num_tokens", [70, 8192])
def test_rows_of_ragged_inputs_are_those_of_each_alone(subject, max_num_tokens):
    model, inputs = subject.model(), subject.inputs()
    with Encoder(model, attention=NATIVE, max_num_tokens=max_num_tokens, check_batches=True) as encoder:
        got = encoder.encode(inputs)
    exact = subject.model().double()
    for one, ours in zip(inputs, got, strict=True):
        with torch.inference_mode():
            truth = dense_logits(exact, one, [], "encoder")
            theirs = dense_logits(model, one, [], "encoder")
        allowed = 4 * (theirs - truth).abs().max()
        assert ours.logits.shape == theirs.shape
        assert (ours.logits - truth).abs().max() <= allowed
        assert ours.last_hidden_state.shape == (len(one), model.config.hidden_size)
