"""The pytest plugin: options of the suite. Every pytest run that finds attnplug imports this file, so it is light."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

MODULE = "attnplug.testing.test_conformance"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of ``pytest --pyargs attnplug.testing``."""
    group = parser.getgroup("attnplug", "attnplug conformance (pytest --pyargs attnplug.testing)")
    group.addoption("--attn-backend", metavar="NAME", help="the installed backend to judge")
    group.addoption("--attn-device", metavar="DEVICE", default="", help="torch's name, such as cpu or cuda")
    group.addoption("--attn-profile", metavar="PROFILE", default="quick", help="quick, gpu or full")
    group.addoption("--attn-axes", metavar="LETTERS", default="", help="axes to run, as ABH; all by default")
    group.addoption("--attn-shard", metavar="I/N", default="1/1", help="every N-th case from the I-th on")
    group.addoption("--attn-case", metavar="ID", default="", help="one case, by the id that a failure printed")
    group.addoption("--attn-report", metavar="FILE", default="", help="JSON to write; an existing one is gone on with")
    group.addoption(
        "--attn-waive",
        metavar="PATTERN=WHY",
        action="append",
        default=[],
        help="cases that will fail, said in the open: they are run, and reported as waived",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Say what is to be given where the suite was collected without a backend."""
    import pytest

    asked = any(getattr(getattr(item, "module", None), "__name__", "") == MODULE for item in items)
    if asked and not config.getoption("--attn-backend"):
        raise pytest.UsageError(
            "attnplug.testing judges one backend: give --attn-backend NAME (attnplug list shows them)"
        )
