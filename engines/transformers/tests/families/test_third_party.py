"""A family and an adapter that another distribution announces serve its models, as any built in does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from acme_llama import AcmeAdapter
from family_zoo import NATIVE, NEW_TOKENS, SUBJECTS, make_case, tokens_of

from attnplug.errors import UnsupportedModel
from attnplug_transformers import Engine
from attnplug_transformers.families import find_family, known_model_types

ACME = next(subject for subject in SUBJECTS if subject.module == "acme_llama")


def test_the_registry_finds_it_by_its_entry_point():
    assert "acme_llama" in known_model_types()
    family = find_family("acme_llama")
    assert family is not None
    assert family.adapter == "acme_llama:AcmeAdapter"


def test_each_layer_has_its_own_heads_in_the_pool_and_its_adapter_made_it():
    before = AcmeAdapter.pools
    with Engine(make_case(ACME).model, attention=NATIVE, num_pages=8) as engine:
        assert AcmeAdapter.pools == before + 1
        assert [(one.num_heads, one.num_kv_heads) for one in engine.model_spec.layers] == [(6, 2), (12, 4), (3, 1)]
        assert [engine.backend.env.kv_pool.get_kv_buffer(index)[0].shape[1] for index in range(3)] == [2, 4, 1]


def test_a_saved_checkpoint_of_it_is_served(tmp_path):
    case = make_case(ACME)
    case.model.save_pretrained(tmp_path)
    with Engine.from_pretrained(tmp_path, attention=NATIVE, num_pages=32) as engine:
        assert tokens_of(engine.generate(case.inputs, NEW_TOKENS)) == case.tokens


def test_without_the_distribution_its_heads_are_not_guessed(monkeypatch, acme_distribution):
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(acme_distribution)])
    assert "acme_llama" not in known_model_types()
    with (
        Engine(make_case(ACME).model, attention=NATIVE, num_pages=8) as engine,
        pytest.raises(UnsupportedModel, match="query heads: the call has 12, the ModelSpec 6") as caught,
    ):
        engine.generate([[3, 4, 5]], 2)
    assert "add a family" in str(caught.value)


def test_explain_reads_it_in_a_fresh_process(tmp_path, acme_distribution):
    ACME.config().save_pretrained(tmp_path)
    code = (
        "import acme_llama; from attnplug_transformers.model_spec import model_spec_from_path as read;"
        f"print([one.num_heads for one in read({str(tmp_path)!r}).layers])"
    )
    paths = [str(acme_distribution), str(Path(__file__).parent)]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths}; {code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "[6, 12, 3]", done.stderr
