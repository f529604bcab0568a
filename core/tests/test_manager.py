"""The manager: lazy loading, one backend a role, options, wrappers, observers, and failures that name their plugin."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pluggy
import pytest

from attnplug.catalog import State
from attnplug.config import AttentionConfig
from attnplug.device import DeviceFacts
from attnplug.errors import BackendIncompatible, BackendLoadError, ConfigError, ContractViolation
from attnplug.hookspecs import hookimpl
from attnplug.manager import BackendManager
from attnplug.select import resolve

CPU = DeviceFacts("cpu")
CREATE = """
from attnplug.hookspecs import hookimpl
@hookimpl
def attnplug_create_backend(name, env, options):
    {body}
"""
OPTIONS = """
from attnplug.hookspecs import hookimpl
from pydantic import BaseModel
class Options(BaseModel):
    max_kv_splits: int = 8
@hookimpl
def attnplug_options_model():
    return Options
@hookimpl
def attnplug_create_backend(name, env, options):
    from attnplug.backend import AttentionBackend
    class Fake(AttentionBackend):
        def __init__(self):
            self.options = options
    return Fake()
"""


def manager(attention=None, **tables):
    return BackendManager(config=AttentionConfig.model_validate({"attention": attention or {}, **tables}))


def wrapper_of(mark):
    from attnplug.backend import AttentionBackend

    class Wrapper(AttentionBackend):
        def __init__(self, inner):
            self.inner, self.mark = inner, mark

    return Wrapper


def test_selecting_one_never_imports_another(dists):
    dists.backend("a")
    dists.backend("b", plugin="raise RuntimeError('boom')")
    one = manager()
    backend = one.create_backend("prefill", "a", None)
    assert backend.made_by == "fake_a_plugin"
    assert "fake_b_plugin" not in sys.modules
    assert one.catalog.get("a").state is State.READY


def test_the_providers_plugin_is_loaded_and_not_the_first_of_its_name(dists):
    dists.backend("x", dist="acme")
    dists.backend("x", dist="zeta")
    assert manager(provider={"x": "zeta"}).create_backend("decode", "x", None).made_by == "zeta_plugin"


def test_two_roles_do_not_answer_for_each_other(dists):
    dists.backend("a")
    dists.backend("b")
    one = manager()
    made = [one.create_backend(role, name, None).made_by for role, name in (("prefill", "a"), ("decode", "b"))]
    assert made == ["fake_a_plugin", "fake_b_plugin"]


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("import no_such_kernel", "no_such_kernel"),
        ("import sys; sys.exit(1)", "SystemExit"),
        ("x = 1", "no hook attnplug_create_backend"),
        (
            "from attnplug.hookspecs import hookimpl\n@hookimpl\ndef attnplug_creat_backend(name):\n  pass",
            "unknown hook",
        ),
        ("from attnplug.hookspecs import hookimpl\n@hookimpl\ndef attnplug_create_backend(nam):\n  pass", "nam"),
        (CREATE.format(body="raise ValueError('no memory')"), "ValueError: no memory"),
    ],
    ids=["raises", "import", "exits", "no-hook", "unknown-hook", "wrong-argument", "create-raises"],
)
def test_a_plugin_that_fails_is_named_with_version_cause_and_remedy(dists, plugin, said):
    dists.backend("bad", plugin=plugin)
    one = manager()
    with pytest.raises(BackendLoadError) as caught:
        one.create_backend("prefill", "bad", None)
    assert said in caught.value.message
    assert "fake-bad 1.0" in caught.value.message
    assert caught.value.remedy
    assert caught.value.__cause__ is not None
    row = one.catalog.get("bad")
    assert row.state is State.BROKEN_LOAD
    assert row.traceback


@pytest.mark.parametrize("body", ["return 3", "return None"])
def test_what_is_no_backend_is_a_violation(dists, body):
    dists.backend("bad", plugin=CREATE.format(body=body))
    with pytest.raises(ContractViolation, match="fake-bad"):
        manager().create_backend("prefill", "bad", None)


def test_options_are_the_plugins_own_model(dists):
    dists.backend("a", plugin=OPTIONS)
    assert manager(backend={"a": {"max_kv_splits": 64}}).create_backend("decode", "a", None).options.max_kv_splits == 64
    assert manager().create_backend("decode", "a", None).options.max_kv_splits == 8
    assert manager().create_backend("decode", "a", None, {"max_kv_splits": 3}).options.max_kv_splits == 3


@pytest.mark.parametrize(
    ("section", "key", "said"),
    [
        ({"max_kv_split": 1}, "backend.a.max_kv_split", "did you mean 'backend.a.max_kv_splits'?"),
        ({"max_kv_splits": "many"}, "backend.a.max_kv_splits", "is 'many'"),
    ],
)
def test_a_wrong_option_names_its_key_and_the_nearest(dists, section, key, said):
    dists.backend("a", plugin=OPTIONS)
    with pytest.raises(ConfigError) as caught:
        manager(backend={"a": section}).options("a")
    assert (caught.value.key, said in caught.value.message) == (key, True)


def test_options_of_a_backend_without_any_are_refused(dists):
    dists.backend("a")
    with pytest.raises(ConfigError, match="has no options"):
        manager(backend={"a": {"x": 1}}).options("a")


def test_probe_answers_are_joined_and_a_raising_probe_is_named(dists):
    probe = "\n@hookimpl\ndef attnplug_probe(spec, device):\n    {body}\n"
    good = CREATE.format(body="return None")
    dists.backend("a", plugin=good + probe.format(body="return [f'{spec.name} on {device}']"))
    dists.backend("b", plugin=good + probe.format(body="raise OSError('no driver')"))
    one = manager()
    assert one.probe("a", CPU) == ["a on cpu"]
    with pytest.raises(BackendLoadError, match="no driver"):
        one.probe("b", CPU)


def test_observers_wrap_creation_and_are_told_late(dists):
    dists.backend("a")
    seen = []

    class Tracer:
        @hookimpl(wrapper=True)
        def attnplug_create_backend(self, name):
            return wrapper_of(f"traced {name}")((yield))

        @hookimpl
        def attnplug_backend_created(self, name, backend):
            seen.append((name, backend.mark))

    one = manager()
    one.add_observer("tracer", Tracer())
    backend = one.create_backend("prefill", "a", None)
    assert (backend.mark, backend.inner.made_by) == ("traced a", "fake_a_plugin")

    class Late:
        @hookimpl
        def attnplug_backend_created(self, name):
            seen.append(("late", name))

    one.add_observer("late", Late())
    assert seen == [("a", "traced a"), ("late", "a")]


def test_wrap_hooks_chain_in_order(dists):
    dists.backend("a")
    one = manager()
    for mark in ("first", "second"):
        wrap = hookimpl(lambda backend, mark=mark: wrapper_of(mark)(backend))
        one.add_observer(mark, SimpleNamespace(attnplug_wrap_backend=wrap))
    one.add_observer("none", SimpleNamespace(attnplug_wrap_backend=hookimpl(lambda backend: None)))
    backend = one.create_backend("prefill", "a", None)
    assert (backend.mark, backend.inner.mark) == ("second", "first")
    assert one.create_backend("prefill", "a", None, wrap=False).made_by == "fake_a_plugin"


def test_an_observer_that_is_refused_is_registered_nowhere(dists):
    dists.backend("a")
    one = manager()
    one.create_backend("prefill", "a", None)
    wrong = SimpleNamespace(attnplug_backend_creatd=hookimpl(lambda name: None))
    with pytest.raises(BackendLoadError, match="attnplug_backend_creatd"):
        one.add_observer("wrong", wrong)
    assert one.observers == ()


OBSERVER = """
from attnplug.hookspecs import hookimpl
@hookimpl
def attnplug_resolve(request):
    return ["b"]
@hookimpl
def attnplug_explain(decision):
    return [f"chose {decision.prefill}"]
"""


def observer(dists, source=OBSERVER):
    dists.dist("obs", entry_points={"attnplug.plugins.v1": {"obs": "obs_mod"}}, modules={"obs_mod": source})


def test_observers_are_off_unless_the_configuration_asks(dists):
    dists.backend("a", more="priority=9")
    dists.backend("b")
    observer(dists)
    off, on = manager(), manager(plugins={"load": ["obs"]})
    assert resolve(None, off.config, CPU, off.catalog, prober=off).prefill == "a"
    decision = resolve(None, on.config, CPU, on.catalog, prober=on)
    assert decision.prefill == "b"
    assert (off.explain(decision), on.explain(decision)) == ([], ["chose b"])


def test_an_unknown_or_broken_observer_is_an_error(dists):
    observer(dists, "raise RuntimeError('boom')")
    with pytest.raises(ConfigError, match="did you mean 'obs'"):
        manager(plugins={"load": ["ob"]})
    with pytest.raises(BackendLoadError, match=r"'obs' of obs 1\.0 failed to load: RuntimeError: boom"):
        manager(plugins={"load": ["obs"]})


@pytest.mark.parametrize(("fallback", "served"), [("never", None), ("listed", "b"), ("reference", "torch_native")])
def test_creation_falls_back_only_as_the_decision_allows_and_says_so(dists, caplog, fallback, served):
    dists.backend("a", plugin=CREATE.format(body="raise ValueError('no memory')"))
    dists.backend("b")
    dists.backend("torch_native")
    one = manager({"prefill": ["a", "b"], "decode": "b", "fallback": fallback})
    decision = resolve(None, one.config, CPU, one.catalog, prober=one)
    assert decision.prefill == "a"
    if served is None:
        with pytest.raises(BackendLoadError, match="no memory"):
            one.create(decision, "prefill", None)
        return
    with caplog.at_level(logging.WARNING):
        created = one.create(decision, "prefill", None)
    assert created.name == served
    assert "falling back to" in caplog.text
    assert "no memory" in caplog.text


def test_every_failed_alternative_is_told(dists):
    for name in ("a", "b"):
        dists.backend(name, plugin=CREATE.format(body=f"raise ValueError('{name} fails')"))
    one = manager({"prefill": ["a", "b"], "decode": "a", "fallback": "listed"})
    decision = resolve(None, one.config, CPU, one.catalog, prober=one)
    with pytest.raises(BackendLoadError, match=r"(?s)a fails.*b fails"):
        one.create(decision, "prefill", None)


def test_a_decision_made_with_another_version_is_refused(dists):
    dists.backend("a")
    one = manager()
    decision = resolve(None, one.config, CPU, one.catalog, prober=one)
    text = decision.to_json().replace('"version": "1.0"', '"version": "9.9"')
    with pytest.raises(BackendIncompatible, match=r"fake-a 9\.9"):
        one.create(type(decision).from_json(text), "prefill", None)


def test_requires_is_checked_before_anything_loads(dists):
    dists.backend("a")
    with pytest.raises(ConfigError, match=r"requires\.pluggy"):
        manager(requires={"pluggy": "<1"})


def test_the_hook_names_fit_the_installed_pluggy():
    manager = pluggy.PluginManager("attnplug")
    from attnplug.hookspecs import HookSpecs

    manager.add_hookspecs(HookSpecs)
    assert {name for name in vars(manager.hook) if name.startswith("attnplug_")} == {
        name for name in vars(HookSpecs) if name.startswith("attnplug_")
    }
