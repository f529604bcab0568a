"""Each line of torch_native's mathematics, when it is broken, is caught by a case of the conformance suite.

One mutant in eight is tried here, the same ones in every run; ``ATTNPLUG_MUTATIONS=full`` tries all, in ten minutes or
so of CPU time, and ``mutation_run.py`` writes the outcome to benchmarks/results/torch_native_mutations.json.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator

import pytest
import torch
from mutation_equivalents import EQUIVALENT
from mutation_run import court, judge, sampled
from mutation_sites import mutants
from mutation_world import Court, all_mutants

WHOLE = os.environ.get("ATTNPLUG_MUTATIONS") == "full"


@pytest.fixture(scope="module")
def a_court() -> Iterator[Court]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield court()
    torch.set_num_threads(threads)


def test_a_mutant_differs_from_its_source_in_one_place_and_has_a_name_of_its_own() -> None:
    source = "def f(x, n):\n    if x < n and x > 0:\n        x = x * 2\n    return min(x, n)\n"
    made = list(mutants("m", source))
    assert len({m.id for m in made}) == len(made) >= 8
    texts = [ast.unparse(m.tree) for m in made]
    assert len(set(texts)) == len(texts)
    assert ast.unparse(ast.parse(source)) not in texts
    assert "    if x <= n and x > 0:" in "\n".join(texts)


def test_the_list_of_equivalent_mutants_names_what_there_is() -> None:
    ids = {m.id for m in all_mutants()}
    gone = sorted(set(EQUIVALENT) - ids)
    assert not gone, f"the code has changed, and these are no mutants of it any more: {gone}"
    assert len(EQUIVALENT) < len(ids) / 3


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_broken_line_is_caught(a_court: Court) -> None:
    every = all_mutants()
    chosen = every if WHOLE else sampled(every)
    outcome = judge(a_court, chosen, doubt=WHOLE)
    assert len(outcome.verdicts) > 80
    told = "\n".join(f"{m.id} (line {m.line})" for m in outcome.survived)
    assert not outcome.survived, f"{len(outcome.survived)} of {len(outcome.verdicts)} are caught by nothing:\n{told}"
    assert not outcome.told_apart, f"listed as equivalent, and caught: {[m.id for m in outcome.told_apart]}"
