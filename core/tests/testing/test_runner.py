"""A backend that is wrong fails, with a message that names the fault; one that is right does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnplug.errors import BackendRejected, Reason
from attnplug.modes import ForwardMode
from attnplug.spec import Dims, Feature, Kind
from attnplug.testing import Case, Status, run_suite
from attnplug.testing.axes import AXES
from attnplug.testing.plan import Plan
from attnplug.testing.report import failure_text, markdown, standings
from attnplug.testing.results import Report
from attnplug.testing.runner import list_cases, run_case
from attnplug.testing.subject import Subject

from .dense_backend import DENSE, DenseBackend
from .subjects import dense_subject

NARROW = DENSE.replace(
    features=frozenset(),
    modes=frozenset({ForwardMode.EXTEND, ForwardMode.DECODE}),
    dtypes=frozenset({"float32"}),
    kv_dtypes=frozenset({"float32"}),
    page_sizes=Dims(values=(1, 16)),
    head_dims=Dims(values=(64, 128)),
    group_sizes=Dims(maximum=4),
)


def judge(text: str, kind: type[DenseBackend] = DenseBackend) -> Any:
    return run_case(dense_subject(kind), Case.parse(text))


def test_a_right_backend_is_proven_on_every_semantic_case() -> None:
    report = run_suite(DenseBackend, DENSE, axes=("A", "B", "K"))
    assert report.ok, failure_text("dense", report.failures[0])
    assert report.count(Status.PROVEN) == len(report.results) > 150
    words = standings(report)
    assert words["features.sinks"].word == "proven"
    assert words["features.lse"].word == "not run"
    assert "| `features.sinks` | proven |" in markdown(report)


def test_what_is_not_declared_is_refused_and_counted() -> None:
    report = run_suite(lambda env: DenseBackend(env, NARROW), NARROW, axes=("J",))
    assert report.ok, failure_text("dense", report.failures[0])
    asked = {Case.parse(result.case).arg for result in report.results if result.status is Status.REFUSED}
    assert {"features.sliding_window", "features.deterministic", "features.heterogeneous_layers"} <= asked
    assert {"page_sizes.64", "head_dims.256", "group_sizes.8", "dtypes.bfloat16", "kv_dtypes.float8_e5m2"} <= asked
    assert {"modes.target_verify", "kinds.linear", "batch_size", "num_tokens", "context", "device", "mirror"} <= asked


WIDE = DENSE.replace(
    kinds=frozenset(Kind),
    linear_families=frozenset({""}),
    features=frozenset(Feature),
    dtypes=frozenset({"float32", "bfloat16", "float16", "float64"}),
    kv_dtypes=frozenset({"float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2"}),
    kv_layouts=frozenset({"NHD", "HND"}),
    needs_cpu_seq_lens=False,
)
"""Everything: whoever carries it refuses nothing that a test asks."""


def test_serving_or_failing_on_what_is_not_declared_fails() -> None:
    report = run_suite(lambda env: DenseBackend(env, WIDE), NARROW, axes=("J",))
    # Limits of a batch are the environment's, and not the declaration's to widen.
    assert {Case.parse(r.case).check for r in report.results if r.status is Status.REFUSED} == {"bad_batch"}
    assert {"serves what it does not declare", "fails instead of refusing"} <= {r.fault for r in report.failures}


class RefusesLate(DenseBackend):
    def __init__(self, env: Any) -> None:
        super().__init__(env, WIDE)

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, *rest: Any) -> Any:
        self.write(layer, batch, k, v)
        raise BackendRejected("late", reasons={"dense": [Reason("features", "sinks", "none")]})


def test_a_refusal_after_a_kernel_fails() -> None:
    case = Case.parse("J:undeclared:decode:q=1:p=9:float32:4/2x64,s:page=16:arg=features.sinks")
    report = run_suite(RefusesLate, NARROW, cases=[case])
    assert [result.fault for result in report.results] == ["refuses after writing"]


class RefusesWithoutReason(DenseBackend):
    def check_batch(self, batch: Any) -> None:
        raise BackendRejected("no", reasons={})


def test_a_refusal_without_a_reason_fails() -> None:
    case = Case.parse("J:bad_batch:decode:q=1:p=9:float32:4/2x64:page=16:arg=batch_size")
    report = run_suite(RefusesWithoutReason, DENSE, cases=[case])
    assert [result.fault for result in report.results] == ["no reason"]


def test_a_refusal_of_what_is_declared_fails() -> None:
    spec = DENSE.replace(features=DENSE.features - {Feature.SINKS})
    subject = Subject("dense", DENSE, lambda env: DenseBackend(env, spec), torch.device("cpu"))
    result = run_case(subject, Case.parse("A:sinks:decode:q=1:p=9:float32:4/2x64,s:page=16"))
    assert result.status is Status.FAILED
    assert result.fault == "refuses what it declares"


class Another(DenseBackend):
    """Made in place of what was asked for."""

    def __init__(self, env: Any) -> None:
        super().__init__(env, DENSE.replace(name="another"))


def test_another_backend_in_its_place_is_noticed() -> None:
    case = Case.parse("A:causal:decode:q=1:p=9:float32:4/2x64:page=16")
    subject = Subject("dense", DENSE, Another, torch.device("cpu"))
    result = run_case(subject, case)
    assert (result.status, result.fault) == (Status.FAILED, "another backend serves")
    assert "asked for 'dense', made 'another'" in result.message


def test_a_proven_case_says_who_served_it() -> None:
    result = judge("C:wrapped:decode:q=1x3:p=9,1,4:float32:4/2x64:page=16:wrap=two_batch")
    assert (result.status, result.served_by) == (Status.PROVEN, "dense")


class Greedy(DenseBackend):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 TiB.")


def test_running_out_of_device_memory_is_a_failure_and_no_way_round_a_case() -> None:
    result = judge("A:causal:decode:q=1x2:p=9,4:float32:4/2x64:page=16", Greedy)
    assert (result.status, result.fault) == (Status.FAILED, "takes more memory than its case has")
    assert "Tried to allocate 9 TiB" in result.message


class ShortWindow(DenseBackend):
    def window(self, q_pos: Any, k_pos: Any, size: int, *, causal: bool) -> Any:
        return super().window(q_pos, k_pos, size - 1, causal=causal)


def test_a_failure_says_claim_finding_fault_and_how_to_run_it_again() -> None:
    text = "A:window_edge:decode:q=1x2:p=14,40:float32:4/2x64,w15:page=16"
    result = judge(text, ShortWindow)
    said = failure_text("dense", result)
    assert result.fault == "window off by one"
    assert "a window of 15 shows w+1 = 16 keys; this shows 15" in said
    # The request whose window reaches past its start is right, and is not blamed.
    assert "request 1 (1 new after 40 cached)" in said
    assert "request 0" not in said
    assert said.endswith(f"reproduce: attnplug conformance dense --case '{text}'")


def test_drawn_cases_shrink_to_a_small_one_that_fails_by_itself() -> None:
    subject = dense_subject(ShortWindow)
    case = Case.parse("P:drawn:decode:q=1x4:p=0,7,30,70:float32:4/2x64:page=16:arg=60")
    result = run_case(subject, case)
    assert result.status is Status.FAILED
    small = Case.parse(result.smallest)
    assert len(small.queries) == 1
    assert run_case(subject, small).status is Status.FAILED
    assert result.smallest in failure_text("dense", result)
    assert run_case(subject, case).smallest == result.smallest


def test_a_waived_failure_is_waived_and_the_report_shows_it() -> None:
    cases = [Case.parse("A:window_edge:decode:q=1:p=40:float32:4/2x64,w15:page=16")]
    report = run_suite(ShortWindow, DENSE, cases=cases, waivers={"A:window_edge:*": "a model's window"})
    assert report.count(Status.WAIVED) == 1
    assert "## Waived by the vendor" in markdown(report)
    assert not report.ok


def test_a_report_is_read_back(tmp_path: Any) -> None:
    report = run_suite(DenseBackend, DENSE, axes=("B",), profile="quick")
    report.save(tmp_path / "r.json")
    assert Report.load(tmp_path / "r.json").as_dict() == report.as_dict()


@pytest.mark.parametrize("letter", list("ABCFHIJKLP"))
def test_every_check_of_an_axis_has_a_case(letter: str) -> None:
    axis = AXES[letter]
    # What one declaration is asked, another must refuse.
    used = {
        case.check for spec in (WIDE, DENSE, NARROW) for case in list_cases(Plan(dense_subject(spec=spec)), (letter,))
    }
    # A drawn case is made by a search.
    assert set(axis.checks) - used <= {"shape"}
    assert all(check.claim and not check.claim.endswith(".") for check in axis.checks.values())
