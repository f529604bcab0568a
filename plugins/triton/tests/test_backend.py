from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="the kernel library is not installed")

from pydantic import ValidationError

from attnplug.modes import ForwardMode, SharedReadEnds
from attnplug.testing import Subject, run_case
from attnplug.testing.plan import Plan, Profile
from attnplug.testing.results import Status
from attnplug.testing.runner import list_cases
from attnplug_triton.interpreted import INTERPRETED_SPEC, interpreted_backend
from attnplug_triton.kernels.version import INTERPRETED
from attnplug_triton.options import TritonOptions
from attnplug_triton.spec import SPEC

SUBJECT = Subject("triton", INTERPRETED_SPEC, interpreted_backend, torch.device("cpu"))
SAMPLE = 31
"""Every so manyth case of the quick profile: the interpreter takes half a second each; a GPU runs them all."""


def sample():
    # The interpreter's conversion to fp8 loses a carry into the exponent, so what is stored is another value there.
    cases = [case for case in list_cases(Plan(SUBJECT, Profile.QUICK)) if case.check != "saturate"]
    return cases[::SAMPLE]


interpreter = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here: conformance runs on the GPU")


@interpreter
@pytest.mark.parametrize("case", sample(), ids=lambda case: case.id)
def test_conformance_holds_in_the_interpreter(case):
    result = run_case(SUBJECT, case)
    wanted = Status.REFUSED if case.axis == "J" else Status.PROVEN
    assert result.status is wanted, f"{result.fault}: {result.message}"


def test_the_declaration_is_sound():
    assert SPEC.validate() == []
    assert INTERPRETED_SPEC.validate() == []


def test_the_spec_imports_neither_torch_nor_triton():
    code = "import sys, attnplug_triton.spec; sys.exit(bool({'torch', 'triton', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("bad", [{"max_kv_splits": 0}, {"ragged": "sometimes"}, {"max_kv_split": 4}], ids=str)
def test_a_wrong_option_is_refused(bad):
    with pytest.raises(ValidationError):
        TritonOptions(**bad)


@interpreter
@pytest.mark.parametrize("options", [{"ragged": "always"}, {"ragged": "never", "max_kv_splits": 3}], ids=str)
def test_options_change_no_answer(options):
    subject = Subject(
        "triton",
        INTERPRETED_SPEC,
        lambda env: interpreted_backend(env, TritonOptions(**options)),
        torch.device("cpu"),
    )
    cases = [case for case in list_cases(Plan(SUBJECT, Profile.QUICK), ("A",)) if case.mode is ForwardMode.DECODE]
    for case in cases[::9]:
        result = run_case(subject, case)
        assert result.status is Status.PROVEN, f"{case.id}: {result.fault}: {result.message}"


@interpreter
def test_shared_rows_are_read_until_the_forward_ends():
    from attnplug.testing.world import World

    case = list_cases(Plan(SUBJECT, Profile.QUICK), ("A",))[0]
    backend = interpreted_backend(World(case, torch.device("cpu")).env)
    assert backend.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.POST_REPLAY
    assert backend.needs_cpu_seq_lens is False


@interpreter
def test_a_probe_names_the_interpreter_as_a_reason_against_a_gpu():
    from attnplug.device import DeviceFacts
    from attnplug_triton.plugin import attnplug_probe

    (reason,) = attnplug_probe(SPEC, DeviceFacts("cuda", 90))
    assert "TRITON_INTERPRET" in reason
