from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnplug_transformers import families

# Test modules import their helpers by name; pytest's importlib mode adds no folder by itself.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def acme_distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what pip would leave of a third party's distribution that announces ``acme_llama``."""
    site = tmp_path_factory.mktemp("site")
    info = site / "acme_llama-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-llama\nVersion: 1.2\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        f"[{families.FAMILIES_GROUP}]\nacme_llama = acme_llama:FAMILY\n", encoding="utf-8"
    )
    return site


@pytest.fixture(autouse=True)
def acme(acme_distribution: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install it for the length of a test."""
    monkeypatch.setattr(families, "_REGISTRY", dict(families._REGISTRY))
    monkeypatch.syspath_prepend(str(acme_distribution))
    importlib.invalidate_caches()
    yield
    importlib.invalidate_caches()
