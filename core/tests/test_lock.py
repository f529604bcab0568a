"""Locks: what one rank resolved, others load, or refuse with the remedy."""

from __future__ import annotations

import json

import pytest

from attnplug import _metadata
from attnplug.catalog import Catalog
from attnplug.config import AttentionConfig
from attnplug.device import DeviceFacts
from attnplug.errors import BackendIncompatible, ConfigError
from attnplug.lock import load_lock, write_lock
from attnplug.select import resolve


class Prober:
    def probe(self, name, device):
        return []

    def preferred(self, request):
        return []


@pytest.fixture
def lock(dists, tmp_path):
    dists.backend("a")
    decision = resolve(None, AttentionConfig(), DeviceFacts("cpu"), prober=Prober())
    path = tmp_path / "lock.json"
    write_lock(decision, path)
    return decision, path


def rescan():
    return Catalog(_metadata.scan(refresh=True))


def test_another_rank_loads_what_one_resolved(lock):
    decision, path = lock
    assert load_lock(path) == decision
    assert sorted(one.name for one in path.parent.iterdir() if one.is_file()) == ["lock.json"]


def test_another_version_is_refused_with_the_command_that_mends_it(lock, dists):
    _, path = lock
    info = dists.root / "fake_a-1.0.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-a\nVersion: 1.1\n")
    with pytest.raises(BackendIncompatible, match=r"locked fake-a 1\.0, here 1\.1") as caught:
        load_lock(path, rescan())
    assert "pip install fake-a==1.0" in caught.value.remedy


def test_another_distribution_of_the_name_is_refused(lock, dists):
    _, path = lock
    (dists.root / "fake_a-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 1.0\n")
    (dists.root / "fake_a-1.0.dist-info").rename(dists.root / "rival-1.0.dist-info")
    with pytest.raises(BackendIncompatible, match="locked from fake-a, here announced by rival"):
        load_lock(path, rescan())


def test_an_absent_or_broken_backend_is_refused(lock, dists):
    _, path = lock
    (dists.root / "fake_a-1.0.dist-info" / "entry_points.txt").unlink()
    with pytest.raises(BackendIncompatible, match="no installed distribution announces"):
        load_lock(path, rescan())


def test_a_lock_of_another_contract_or_format_is_refused(lock):
    _, path = lock
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "contract": [2, 0]}))
    with pytest.raises(BackendIncompatible, match=r"contract 2\.0"):
        load_lock(path)
    path.write_text(json.dumps({**data, "format": 0}))
    with pytest.raises(ConfigError, match="format 0"):
        load_lock(path)


@pytest.mark.parametrize("content", [None, "", "{", "\x00"])
def test_a_file_that_is_no_lock_is_a_config_error(dists, tmp_path, content):
    path = tmp_path / "lock.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"lock\.json"):
        load_lock(path)


def test_a_lock_that_cannot_be_written_says_so(lock, tmp_path):
    with pytest.raises(ConfigError, match="cannot write"):
        write_lock(lock[0], tmp_path / "absent" / "lock.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        write_lock(lock[0], tmp_path / "folder")
    assert not list(tmp_path.glob(".folder*"))  # Nothing is left of the attempt.


def test_a_lock_is_readable_as_any_new_file_is(lock, tmp_path):
    (tmp_path / "other").touch()
    write_lock(lock[0], tmp_path / "new.lock")
    assert (tmp_path / "new.lock").stat().st_mode == (tmp_path / "other").stat().st_mode
