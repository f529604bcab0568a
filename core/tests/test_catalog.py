"""Discovery: what metadata announces becomes rows with states and reasons, and no fault of one reaches another."""

from __future__ import annotations

import sys

import pytest

from attnplug import _metadata
from attnplug.catalog import Catalog, State
from attnplug.errors import (
    BackendConflict,
    BackendIncompatible,
    BackendLoadError,
    BackendRejected,
    UnknownBackend,
)


def state(catalog, name):
    (row,) = catalog.rows(name)
    return row.state


def test_a_valid_backend_is_described_without_importing_its_plugin(dists):
    dists.backend("good")
    catalog = Catalog()
    assert state(catalog, "good") is State.DESCRIBED
    assert "fake_good_plugin" not in sys.modules
    assert (catalog.get("good").distribution, catalog.get("good").version) == ("fake-good", "1.0")


def test_asking_for_one_name_reads_one_spec(dists):
    dists.backend("good")
    dists.backend("other")
    assert Catalog().get("good").state is State.DESCRIBED
    assert "fake_other_spec" not in sys.modules


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import no_such_module", "ModuleNotFoundError"),
        ("SPEC = 3", "int"),
        ("from attnplug.spec import BackendSpec; SPEC = BackendSpec(name='bad', colour='red')", "colour"),
        ("from attnplug.spec import BackendSpec; SPEC = BackendSpec(name='other')", "spec.name is 'other'"),
        ("from attnplug.spec import BackendSpec; SPEC = BackendSpec(name='bad', kinds=frozenset())", "kinds is empty"),
        ("from attnplug.spec import BackendSpec; SPEC = BackendSpec(name='bad', kinds=None)", "TypeError"),
    ],
    ids=["raises", "exits", "import", "wrong-type", "unknown-field", "wrong-name", "invalid", "malformed"],
)
def test_broken_spec_is_listed_not_raised(dists, source, said):
    dists.backend("good")
    dists.backend("bad", spec=source)
    catalog = Catalog()
    assert [(row.name, row.state) for row in catalog.entries] == [
        ("bad", State.BROKEN_SPEC),
        ("good", State.DESCRIBED),
    ]
    (bad,) = catalog.rows("bad")
    assert said in " ".join(map(str, bad.reasons))
    with pytest.raises(BackendLoadError, match=r"fake-bad 1\.0"):
        catalog.require("bad")


def test_a_spec_that_raises_keeps_its_traceback(dists):
    dists.backend("bad", spec="def f():\n    raise KeyError('deep')\nf()")
    (bad,) = Catalog().rows("bad")
    assert "in f" in bad.traceback
    assert bad.error == "KeyError: 'deep'"


def test_a_spec_that_prints_does_not_spoil_a_listing(dists, capsys):
    dists.backend("loud", spec="print('hello')\nSPEC = 3")
    assert Catalog().entries[0].state is State.BROKEN_SPEC
    assert capsys.readouterr().out == ""


def test_two_distributions_with_one_name_conflict_until_a_provider_is_named(dists):
    dists.backend("triton", dist="acme-attn")
    dists.backend("triton", dist="zeta-attn", version="2.0")
    catalog = Catalog()
    assert [row.state for row in catalog.rows("triton")] == [State.CONFLICT, State.CONFLICT]
    with pytest.raises(BackendConflict, match=r"acme-attn 1\.0, zeta-attn 2\.0") as caught:
        catalog.require("triton")
    assert "[provider]" in caught.value.remedy
    settled = Catalog(providers={"triton": "Zeta_Attn"})
    assert settled.require("triton").distribution == "zeta-attn"
    assert [row.state for row in settled.rows("triton")] == [State.BLOCKED, State.DESCRIBED]


def test_a_provider_that_announces_nothing_settles_nothing(dists):
    dists.backend("triton", dist="acme-attn")
    dists.backend("triton", dist="zeta-attn")
    assert {row.state for row in Catalog(providers={"triton": "nobody"}).rows("triton")} == {State.CONFLICT}


def test_another_distribution_than_the_provider_never_serves(dists):
    dists.backend("triton", dist="acme-attn")
    catalog = Catalog(providers={"triton": "zeta-attn"})
    assert state(catalog, "triton") is State.BLOCKED
    with pytest.raises(BackendRejected, match="provider: asked zeta-attn, supported installed: acme-attn"):
        catalog.require("triton")
    assert state(Catalog(providers={"triton": "Acme_Attn"}), "triton") is State.DESCRIBED


@pytest.mark.parametrize("named", ["bad", "fake-bad", "Fake_Bad"])
def test_no_code_of_a_blocked_backend_runs(dists, named):
    dists.backend("bad", spec="raise RuntimeError('ran')")
    catalog = Catalog(block=[named])
    assert state(catalog, "bad") is State.BLOCKED
    with pytest.raises(BackendRejected, match=r"plugins\.block"):
        catalog.require("bad")


def test_only_allowed_backends_are_read(dists):
    dists.backend("good")
    dists.backend("bad", spec="raise RuntimeError('ran')")
    catalog = Catalog(allow=["good"])
    assert (state(catalog, "good"), state(catalog, "bad")) == (State.DESCRIBED, State.BLOCKED)


@pytest.mark.parametrize("major", [0, 2, 12])
def test_another_major_is_incompatible_without_running_its_code(dists, major):
    groups = (f"attnplug.specs.v{major}", f"attnplug.backends.v{major}")
    dists.backend("old", spec="raise RuntimeError('ran')", groups=groups)
    catalog = Catalog()
    assert state(catalog, "old") is State.INCOMPATIBLE
    assert "fake_old_spec" not in sys.modules
    with pytest.raises(BackendIncompatible, match=f"asked v{major}, supported v1"):
        catalog.require("old")


def test_a_distribution_that_speaks_two_majors_is_used_by_ours(dists):
    groups = ("attnplug.specs.v1", "attnplug.backends.v1", "attnplug.specs.v2", "attnplug.backends.v2")
    dists.backend("both", groups=groups)
    assert state(Catalog(), "both") is State.DESCRIBED


@pytest.mark.parametrize(
    ("more", "field"),
    [("contract=(1, 99)", "contract"), ("contract=(2, 0)", "contract"), ("needs=frozenset({'warp'})", "needs")],
)
def test_a_spec_that_needs_more_than_this_core_is_incompatible(dists, more, field):
    dists.backend("newer", more=more)
    (row,) = Catalog().rows("newer")
    assert (row.state, [reason.field for reason in row.reasons]) == (State.INCOMPATIBLE, [field])


@pytest.mark.parametrize("group", ["attnplug.specs.v1", "attnplug.backends.v1"])
def test_one_entry_point_without_the_other_is_a_visible_fault(dists, group):
    dists.backend("half", groups=(group,))
    (row,) = Catalog().rows("half")
    assert row.state is State.BROKEN_SPEC
    missing = "attnplug.backends.v1" if "specs" in group else "attnplug.specs.v1"
    assert missing in str(row.reasons[0])


def test_a_missing_kernel_module_is_told_without_import(dists):
    dists.backend("fast", more="kernel_modules=('no_such_kernel', 'json')")
    (row,) = Catalog().rows("fast")
    assert row.state is State.MISSING_KERNEL
    assert [reason.asked for reason in row.reasons] == ["import no_such_kernel"]
    with pytest.raises(BackendRejected) as caught:
        Catalog().require("fast")
    assert caught.value.remedy == "pip install 'fake-fast[kernel]'"


def test_a_dotted_kernel_module_is_found_without_importing_its_package(dists):
    package = dists.root / "kernel_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "ops.py").write_text("")
    dists.backend("fast", more="kernel_modules=('kernel_pkg.ops',)")
    dists.backend("faster", more="kernel_modules=('kernel_pkg.nothing',)")
    catalog = Catalog()
    assert (state(catalog, "fast"), state(catalog, "faster")) == (State.DESCRIBED, State.MISSING_KERNEL)


@pytest.mark.parametrize(
    ("installed", "expected"),
    [("0.5", State.MISSING_KERNEL), ("0.6.14", State.DESCRIBED), ("0.8", State.MISSING_KERNEL), (None, "absent")],
)
def test_the_kernel_extras_bounds_are_read_without_import(dists, installed, expected):
    dists.backend("fast", requires=("numpy", "fast-lib<0.8,>=0.6; extra == 'kernel'"))
    if installed:
        dists.dist("fast-lib", version=installed)
    (row,) = Catalog().rows("fast")
    if expected == "absent":
        assert (row.state, row.reasons[0].supported) == (State.MISSING_KERNEL, "not installed")
    else:
        assert row.state is expected


def test_an_old_name_forwards_with_a_warning(dists):
    dists.backend("good", more="aliases=('gd',)")
    with pytest.warns(DeprecationWarning, match="'gd' is deprecated: write 'good'"):
        assert Catalog().get("gd").name == "good"


def test_names_are_case_sensitive_and_the_nearest_is_suggested(dists):
    dists.backend("good")
    with pytest.raises(UnknownBackend, match="did you mean 'good'"):
        Catalog().require("Good")


@pytest.mark.parametrize(
    ("name", "command"),
    [("flashinfer", "pip install attnplug-flashinfer"), ("flashinfr", "pip install attnplug-flashinfer")],
)
def test_a_known_backend_that_is_not_installed_gets_its_pip_command(dists, name, command):
    with pytest.raises(UnknownBackend) as caught:
        Catalog().require(name)
    assert caught.value.remedy == command


def test_a_hidden_copy_is_not_used_and_is_reported_stale(dists, tmp_path, monkeypatch):
    dists.backend("good", version="2.0")
    hidden = tmp_path / "hidden"
    dists.dist("fake-good", version="1.0", entry_points={"attnplug.specs.v1": {"good": "old:SPEC"}}, root=hidden)
    monkeypatch.setattr(sys, "path", [*sys.path, str(hidden)])
    catalog = Catalog(_metadata.scan(refresh=True))
    assert catalog.get("good").version == "2.0"
    assert [dist.version for dist in catalog.scan.stale] == ["1.0"]


def test_metadata_is_read_once_until_refreshed(dists):
    dists.backend("good")
    catalog = Catalog()
    dists.backend("late")
    assert Catalog().names == ("good",)
    catalog.refresh()
    assert catalog.names == ("good", "late")


def test_rows_come_in_one_order_whatever_the_file_system_says(dists):
    for name in ("zeta", "alpha", "mid"):
        dists.backend(name)
    assert [row.name for row in Catalog().entries] == ["alpha", "mid", "zeta"]
