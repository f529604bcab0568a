"""A hook that raises, or answers what it may not, is one error that names its plugin; nothing stays half registered."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from attnplug.catalog import Catalog
from attnplug.errors import BackendLoadError
from attnplug.hookspecs import hookimpl
from attnplug.manager import BackendManager

from .fake_dists import PLUGIN


def raising(*arguments):
    raise ValueError("boom")


HOOKS = {
    "attnplug_resolve": (hookimpl(lambda request: raising()), lambda one: one.preferred(None)),
    "attnplug_explain": (hookimpl(lambda decision: raising()), lambda one: one.explain(None)),
    "attnplug_wrap_backend": (
        hookimpl(lambda backend, env: raising()),
        lambda one: one.create_backend("prefill", "a", None),
    ),
    "attnplug_backend_created": (
        hookimpl(lambda name: raising()),
        lambda one: one.create_backend("prefill", "a", None),
    ),
    "attnplug_create_backend": (
        hookimpl(lambda name: raising(), tryfirst=True),
        lambda one: one.create_backend("prefill", "a", None),
    ),
    "attnplug_register_cli": (hookimpl(lambda app: raising()), lambda one: one.register_cli(None)),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_an_observers_hook_that_raises_is_named(dists, hook):
    dists.backend("a")
    one = BackendManager(Catalog())
    function, call = HOOKS[hook]
    one.add_observer("quiet", SimpleNamespace())
    one.add_observer("tracer", SimpleNamespace(**{hook: function}))
    with pytest.raises(BackendLoadError, match=f"^plugin 'tracer' failed in {hook}: ValueError: boom"):
        call(one)


@pytest.mark.parametrize("hook", ["attnplug_resolve", "attnplug_explain"])
@pytest.mark.parametrize("answer", [5, [5], "text"], ids=repr)
def test_an_answer_of_another_type_is_an_error(dists, hook, answer):
    one = BackendManager(Catalog())
    implementation = {
        "attnplug_resolve": hookimpl(lambda request: answer),
        "attnplug_explain": hookimpl(lambda decision: answer),
    }[hook]
    one.add_observer("tracer", SimpleNamespace(**{hook: implementation}))
    with pytest.raises(BackendLoadError, match=f"'tracer' failed in {hook}: .* returned .*; allowed: a list of texts"):
        HOOKS[hook][1](one)


@pytest.mark.parametrize("leave", ["raise SystemExit(7)", "raise ValueError('boom')"])
def test_a_plugin_that_leaves_while_it_creates_is_a_load_error(dists, leave):
    create = f"from attnplug.hookspecs import hookimpl\n@hookimpl\ndef attnplug_create_backend(name):\n    {leave}\n"
    dists.backend("a", plugin=create)
    with pytest.raises(BackendLoadError, match=r"'a' of fake-a 1\.0 failed to create its backend: "):
        BackendManager(Catalog()).create_backend("prefill", "a", None)


@pytest.mark.parametrize(
    ("hook", "body"),
    [("attnplug_options_model()", "raise ValueError('boom')"), ("attnplug_probe(spec)", "return 'no driver'")],
)
def test_a_backends_own_hook_that_fails_is_named(dists, hook, body):
    create = "from attnplug.hookspecs import hookimpl\n@hookimpl\ndef attnplug_create_backend(name):\n    return None\n"
    dists.backend("a", plugin=f"{create}@hookimpl\ndef {hook}:\n    {body}\n")
    one = BackendManager(Catalog())
    with pytest.raises(BackendLoadError, match=r"'a'.*(boom|no driver)"):
        one.options("a") if "options" in hook else one.probe("a", None)


def test_an_observer_that_raises_when_told_of_earlier_backends_is_registered_nowhere(dists):
    dists.backend("a")
    one = BackendManager(Catalog())
    one.create_backend("prefill", "a", None)
    with pytest.raises(BackendLoadError, match="plugin 'late' failed in attnplug_backend_created"):
        one.add_observer("late", SimpleNamespace(attnplug_backend_created=hookimpl(lambda name: raising())))
    assert one.observers == ()
    one.create_backend("prefill", "a", None)


def test_a_backends_own_wrap_hook_runs_where_backends_are_composed_later(dists):
    own = "\n@hookimpl\ndef attnplug_wrap_backend(backend):\n    backend.mark = 'own'\n    return backend\n"
    dists.backend("a", plugin=PLUGIN + own)
    seen = []
    one = BackendManager(Catalog())
    one.add_observer("late", SimpleNamespace(attnplug_wrap_backend=hookimpl(lambda backend: seen.append(backend.mark))))
    assert one.create_backend("prefill", "a", None, wrap=False).mark == "own"
    assert seen == []
    one.create_backend("prefill", "a", None)
    assert seen == ["own"]
