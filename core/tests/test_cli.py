"""The command line: what it prints, its JSON, and exit 2 without a traceback for what the user must mend."""

from __future__ import annotations

import json

import pytest

from attnplug.cli import main

ENGINE = """
import typer
app = typer.Typer()
@app.command()
def generate(prompt: str = "hi"):
    print("generated", prompt)
"""
READER = """
from attnplug.model_spec import LayerSpec, ModelSpec
def read(path):
    layer = LayerSpec(layer_id=0, num_heads=2, num_kv_heads=1, head_dim=64, v_head_dim=64, has_sinks="sinks" in path)
    return ModelSpec(name=path, layers=(layer,), dtype="float32", max_context_len=64)
"""
BROKEN = "raise RuntimeError('boom')"


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = main(arguments)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call


def run_json(run, *arguments):
    code, out, err = run(*arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_list_shows_every_state_and_reason(dists, run):
    dists.backend("a", more="summary='quick'")
    dists.backend("bad", spec=BROKEN)
    rows = run_json(run, "list")
    assert [(row["name"], row["state"], row["distribution"], row["version"]) for row in rows] == [
        ("a", "DESCRIBED", "fake-a", "1.0"),
        ("bad", "BROKEN_SPEC", "fake-bad", "1.0"),
    ]
    assert rows[0]["reasons"] == []
    assert "boom" in rows[1]["reasons"][0]["supported"]
    code, out, _ = run("list")
    assert code == 0
    assert "quick" in out
    assert "RuntimeError: boom" in out


def test_list_with_nothing_installed_says_what_to_install(dists, run):
    code, out, _ = run("list")
    assert (code, "pip install attnplug-torch-native" in out) == (0, True)
    assert run_json(run, "list") == []


def test_list_obeys_the_configuration(dists, run, tmp_path, monkeypatch):
    dists.backend("a")
    monkeypatch.setenv("ATTNPLUG_BLOCK", "a")
    assert run_json(run, "list")[0]["state"] == "BLOCKED"
    monkeypatch.delenv("ATTNPLUG_BLOCK")
    (tmp_path / "c.toml").write_text("[plugins]\nblock = 3\n")
    code, _, err = run("list", "--config", "c.toml")
    assert (code, "plugins.block is 3; allowed: a list of names" in err) == (2, True)


@pytest.mark.parametrize("command", ["resolve", "explain"])
def test_an_unknown_backend_gets_nearest_names_and_the_pip_command(dists, run, command):
    dists.backend("torch_nativ")
    code, out, err = run(command, "--prefill", "flashinfr", "--device", "cpu")
    assert (code, out) == (2, "")
    assert "did you mean 'flashinfer'" in err
    assert "remedy: pip install attnplug-flashinfer" in err


def test_resolve_decides_and_writes_the_lock(dists, run, tmp_path):
    from attnplug.lock import load_lock

    dists.backend("a")
    dists.backend("b")
    arguments = ("resolve", "--prefill", "b", "--device", "cpu", "--page-size", "32")
    data = run_json(run, *arguments, "-o", str(tmp_path / "lock.json"))
    prefill, decode = data["choices"]
    assert (prefill["chosen"]["name"], prefill["rung"], prefill["source"]) == ("b", "command line", "--prefill")
    assert (decode["chosen"]["name"], decode["rung"], data["page_size"]) == ("a", "auto", 32)
    assert load_lock(tmp_path / "lock.json").to_dict() == data


def test_explain_names_the_rung_and_every_reason(dists, run, tmp_path, monkeypatch):
    dists.backend("a")
    dists.backend("b", more="priority=9, head_dims=__import__('attnplug').spec.Dims(values=(128,))")
    dists.dist("engine", entry_points={"attnplug.model_specs.v1": {"e": "reader:read"}}, modules={"reader": READER})
    (tmp_path / "plain").mkdir()
    monkeypatch.setenv("ATTNPLUG_DECODE", "a")
    data = run_json(run, "explain", "--model", "plain", "--device", "cpu")
    prefill, decode = data["roles"]
    assert (prefill["chosen"], decode["rung"], decode["source"]) == ("a", "environment", "ATTNPLUG_DECODE")
    (other,) = [row for row in prefill["candidates"] if row["name"] == "b"]
    assert (other["state"], other["reasons"]) == (
        "REJECTED",
        [{"field": "head_dims", "asked": "64 (layer 0)", "supported": "128"}],
    )
    code, out, _ = run("explain", "--model", "plain", "--device", "cpu")
    assert code == 0
    assert "head_dims: asked 64 (layer 0), supported 128" in out


def test_a_model_with_sinks_on_a_backend_without_is_refused(dists, run, tmp_path):
    dists.backend("a")
    dists.dist("engine", entry_points={"attnplug.model_specs.v1": {"e": "reader:read"}}, modules={"reader": READER})
    (tmp_path / "sinks").mkdir()
    code, _, err = run("resolve", "--model", "sinks", "--prefill", "a", "--decode", "a", "--device", "cpu")
    assert (code, "a: sinks: asked sinks (layer 0)" in err) == (2, True)


@pytest.mark.parametrize(
    ("reader", "said"),
    [
        (None, "pip install attnplug-transformers"),
        ("def read(path):\n    return None", "is no path that exists"),
        ("def read(path):\n    raise KeyError('layers')", "e (engine 1.0): KeyError: 'layers'"),
        ("def read(path):\n    return 3", "returned a int, not a ModelSpec"),
    ],
    ids=["no-engine", "absent-path", "raises", "wrong-type"],
)
def test_a_model_that_cannot_be_read_is_an_error(dists, run, reader, said):
    dists.backend("a")
    if reader:
        dists.dist("engine", entry_points={"attnplug.model_specs.v1": {"e": "reader:read"}}, modules={"reader": reader})
    code, _, err = run("resolve", "--model", "model", "--device", "cpu")
    assert (code, said in err) == (2, True)


def test_another_engine_answers_where_one_fails_to_read_a_model(dists, run):
    dists.backend("a")
    for name, source in (("d", "def read(path):\n    raise KeyError('layers')"), ("e", READER)):
        points = {"attnplug.model_specs.v1": {name: f"reader_{name}:read"}}
        dists.dist(f"engine-{name}", entry_points=points, modules={f"reader_{name}": source})
    assert run_json(run, "resolve", "--model", "model", "--device", "cpu")["model"] == "model"


def test_a_plugin_that_raises_at_load_is_one_message(dists, run):
    dists.backend("bad", plugin=BROKEN)
    code, _, err = run("resolve", "--prefill", "bad", "--decode", "bad", "--device", "cpu")
    assert code == 2
    assert "fake-bad 1.0 failed to load fake_bad_plugin: RuntimeError: boom" in err


def test_two_distributions_with_one_name_are_told_how_to_choose(dists, run):
    dists.backend("x", dist="acme")
    dists.backend("x", dist="zeta")
    code, _, err = run("resolve", "--prefill", "x", "--device", "cpu")
    assert (code, "acme 1.0, zeta 1.0" in err, "[provider] x" in err) == (2, True, True)


OPTIONS = """
from attnplug.hookspecs import hookimpl
from pydantic import BaseModel
class Options(BaseModel):
    splits: int = 1
@hookimpl
def attnplug_options_model():
    return Options
@hookimpl
def attnplug_create_backend(name, env, options):
    return None
"""


def test_validate_tells_every_fault_at_once(dists, run, tmp_path):
    dists.backend("a", plugin=OPTIONS)
    (tmp_path / "c.toml").write_text(
        '[attention]\nprefill = "a"\ndecode = "aa"\n[backend.a]\nsplit = 3\n[requires]\npluggy = "<1"\n'
    )
    code, _, err = run("validate", "c.toml")
    assert code == 2
    for said in ("'aa'", "did you mean 'backend.a.splits'", "requires.pluggy: asked <1"):
        assert said in err
    code, out, _ = run("validate", "c.toml", "--json")
    data = json.loads(out)
    assert (code, data["ok"], len(data["problems"])) == (2, False, 3)


def test_validate_checks_options_beside_a_wrong_key(dists, run, tmp_path):
    dists.backend("a", plugin=OPTIONS)
    (tmp_path / "c.toml").write_text("[attention]\nprefil = 'a'\n[backend.a]\nsplit = 3\n")
    code, _, err = run("validate", "c.toml")
    assert (code, "'attention.prefill'" in err, "'backend.a.splits'" in err) == (2, True, True)


@pytest.mark.parametrize("name", ["absent.toml", "c.ini"])
def test_validate_of_a_file_that_cannot_be_read_exits_2(dists, run, name):
    code, _, err = run("validate", name)
    assert (code, name in err) == (2, True)


def test_validate_passes_a_right_file_and_notes_what_is_absent(dists, run, tmp_path):
    dists.backend("a", plugin=OPTIONS)
    (tmp_path / "c.yaml").write_text("attention: {prefill: [flashmla, a]}\nbackend: {a: {splits: 3}}\n")
    code, out, _ = run("validate", "--config", "c.yaml")
    assert (code, "ok" in out, "'flashmla' is not installed here" in out) == (0, True, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [("[attention]\nprefil = 'a'\n", "did you mean 'attention.prefill'"), ("[attention]\npage_size = 'x'\n", "'x'")],
)
def test_a_wrong_file_exits_2_naming_file_and_key(dists, run, tmp_path, text, said):
    (tmp_path / "c.toml").write_text(text)
    for command in (("validate", "c.toml"), ("resolve", "--config", "c.toml"), ("explain", "--config", "c.toml")):
        code, _, err = run(*command)
        assert (code, said in err, "c.toml" in err) == (2, True, True)


def test_doctor_shows_tracebacks_stale_copies_and_what_to_do(dists, run, tmp_path, monkeypatch):
    dists.backend("bad", spec="def f():\n    raise KeyError('deep')\nf()")
    dists.backend("worse", plugin=BROKEN)
    hidden = tmp_path / "hidden"
    dists.dist("fake-bad", version="0.1", root=hidden)
    monkeypatch.syspath_prepend(str(tmp_path))
    import sys

    monkeypatch.setattr(sys, "path", [*sys.path, str(hidden)])
    data = run_json(run, "doctor", "--load")
    assert {row["name"]: row["state"] for row in data["plugins"]} == {"bad": "BROKEN_SPEC", "worse": "BROKEN_LOAD"}
    assert "in f" in data["plugins"][0]["traceback"]
    assert any("stale metadata: fake-bad 0.1" in text for text in data["problems"])
    assert data["versions"]["torch"]
    code, out, _ = run("doctor")
    assert (code, "KeyError: 'deep'" in out) == (0, True)


def test_an_engines_command_is_found_when_given_and_named_in_help(dists, run):
    dists.dist(
        "engine", entry_points={"attnplug.commands.v1": {"generate": "engine_cli:app"}}, modules={"engine_cli": ENGINE}
    )
    import sys

    code, out, _ = run("--help")
    assert (code, "From engine 1.0." in out, "engine_cli" in sys.modules) == (0, True, False)
    assert run("generate", "--prompt", "you")[:2] == (0, "generated you\n")


def test_a_command_that_fails_to_import_is_named(dists, run):
    dists.dist(
        "engine", entry_points={"attnplug.commands.v1": {"generate": "engine_cli:app"}}, modules={"engine_cli": BROKEN}
    )
    code, _, err = run("generate")
    assert (code, "'generate' of engine 1.0 failed to load: RuntimeError: boom" in err) == (2, True)


REGISTERS = """
from attnplug.hookspecs import hookimpl
@hookimpl
def attnplug_register_cli(app):
    @app.command()
    def trace():
        print("traced")
"""


def test_a_plugin_that_the_configuration_turns_on_may_register_commands(dists, run, monkeypatch):
    dists.dist("obs", entry_points={"attnplug.plugins.v1": {"obs": "obs_mod"}}, modules={"obs_mod": REGISTERS})
    assert run("trace")[0] == 2
    monkeypatch.setenv("ATTNPLUG_PLUGINS", "obs")
    assert run("trace")[:2] == (0, "traced\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lst"], "did you mean 'list'"),
        (["generate"], "pip install attnplug-transformers"),
        (["list", "--bad"], "--bad"),
    ],
)
def test_a_wrong_command_or_option_exits_2(dists, run, arguments, said):
    code, _, err = run(*arguments)
    assert (code, said in err) == (2, True)


def test_a_deprecated_name_is_told_on_stderr(dists, run):
    dists.backend("good", more="aliases=('gd',)")
    code, _, err = run("resolve", "--prefill", "gd", "--device", "cpu")
    assert (code, "warning: backend name 'gd' is deprecated" in err) == (0, True)


def test_version_is_printed(run):
    assert run("--version")[1].startswith("attnplug ")
