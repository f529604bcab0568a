"""The table in docs/models.md says what these tests prove, and no more."""

from __future__ import annotations

import re
from pathlib import Path

import models_table
import pytest
import test_bf16
import test_matrix
from family_zoo import CHUNK_SIZES, PAGE_SIZES, SUBJECTS

REAL = Path(__file__).parents[1] / "test_real_weights.py"


def test_the_documents_table_is_what_is_proven_now():
    document = models_table.DOCUMENT.read_text(encoding="utf-8")
    assert models_table.replace(document) == document, (
        "stale: run python engines/transformers/tests/families/models_table.py"
    )


def test_a_change_of_what_is_proven_makes_the_table_stale(monkeypatch):
    document = models_table.DOCUMENT.read_text(encoding="utf-8")
    monkeypatch.setattr(models_table, "PAGE_SIZES", (1, 16))
    assert models_table.replace(document) != document


def _subjects_of(test) -> set[str]:
    (mark,) = [one for one in test.pytestmark if one.name == "parametrize" and one.args[0] == "subject"]
    return {subject.name for subject in mark.args[1]}


def test_every_row_is_in_both_tests():
    named = {subject.name for subject in SUBJECTS}
    in_float32 = _subjects_of(test_matrix.test_tokens_are_those_of_dense_eager_attention) | _subjects_of(
        test_matrix.test_rows_of_ragged_inputs_are_those_of_each_alone
    )
    in_bfloat16 = _subjects_of(test_bf16.test_logits_are_within_the_budget_in_prompts_and_in_decoding) | _subjects_of(
        test_bf16.test_an_encoders_rows_are_within_the_budget
    )
    assert in_float32 == in_bfloat16 == named
    assert set(test_matrix.CELLS) == {(page, chunk) for page in PAGE_SIZES for chunk in CHUNK_SIZES}


@pytest.mark.parametrize("weights", sorted({name for subject in SUBJECTS for name in subject.weights}))
def test_real_weights_that_are_named_are_served_by_a_test(weights):
    short = re.split(r"[-\d]", weights)[0].lower()
    assert re.search(rf'load_model\("{short}', REAL.read_text(encoding="utf-8"))
