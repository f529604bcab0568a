"""Discovery tests see only the distributions that they write."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("fake_dists", Path(__file__).with_name("fake_dists.py"))
fake_dists = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake_dists)


@pytest.fixture
def dists(tmp_path, monkeypatch):
    """Fake distributions first on ``sys.path``; what is installed for real announces nothing."""
    import importlib.metadata as importlib_metadata

    from attnplug import _metadata

    root = tmp_path / "site"
    root.mkdir()
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ATTNPLUG_")]:
        monkeypatch.delenv(name)
    every = importlib_metadata.distributions

    def only_fakes(**query):
        # A query by name is a look-up of a version, and real ones may be asked for; the scan itself sees the fakes.
        found = every(**query)
        return found if query else (one for one in found if str(one.locate_file("")).startswith(str(tmp_path)))

    monkeypatch.setattr(_metadata.importlib_metadata, "distributions", only_fakes)
    monkeypatch.setattr(_metadata, "_cached", None)
    fakes = fake_dists.FakeDists(root)
    yield fakes
    for module in fakes.modules():
        sys.modules.pop(module, None)
