"""The suite under pytest: a test a case. Run with ``pytest --pyargs attnplug.testing --attn-backend NAME``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from attnplug.errors import AttnplugError
from attnplug.testing.case import Case
from attnplug.testing.session import Session


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draw the cases from the spec of the backend that is asked for."""
    if "case" not in metafunc.fixturenames:
        return
    try:
        cases = Session.of(metafunc.config).cases if metafunc.config.getoption("--attn-backend") else [None]
    except AttnplugError as error:
        raise pytest.UsageError(str(error)) from error
    metafunc.parametrize("case", cases, ids=lambda case: case.id if isinstance(case, Case) else "no_backend")


@pytest.fixture(scope="session")
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """The run: its subject, its report, and what an earlier run has finished."""
    found = Session.of(request.config)
    yield found
    found.save()


def test_case(session: Session, case: Case) -> None:
    """A declared thing is proven, an undeclared one is refused."""
    session.judge(case)
