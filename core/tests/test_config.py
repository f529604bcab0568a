"""Configuration: one ladder, exact keys and types, and errors that name file, key, value and what is allowed."""

from __future__ import annotations

import json

import pytest

from attnplug.config import AttentionConfig
from attnplug.errors import ConfigError

TABLES = {
    "attention": {"prefill": "a", "decode": ["b", "auto"], "page_size": 16, "draft": {"decode": "c"}},
    "backend": {"b": {"splits": 4}},
    "plugins": {"block": ["acme"]},
    "requires": {"pluggy": ">=1"},
    "provider": {"b": "acme-attn"},
}
TOML = """
[attention]
prefill = "a"
decode = ["b", "auto"]
page_size = 16
[attention.draft]
decode = "c"
[backend.b]
splits = 4
[plugins]
block = ["acme"]
[requires]
pluggy = ">=1"
[provider]
b = "acme-attn"
"""
YAML = """
attention: {prefill: a, decode: [b, auto], page_size: 16, draft: {decode: c}}
backend: {b: {splits: 4}}
plugins: {block: [acme]}
requires: {pluggy: ">=1"}
provider: {b: acme-attn}
"""


def load(tmp_path, path=None, **options):
    return AttentionConfig.load(path, env=options.pop("env", {}), cwd=tmp_path, **options)


@pytest.mark.parametrize(("name", "text"), [("a.toml", TOML), ("a.json", json.dumps(TABLES)), ("a.yaml", YAML)])
def test_each_file_kind_reads_as_the_same_tables(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    config = AttentionConfig.from_file(path)
    assert config == AttentionConfig.model_validate(TABLES)
    assert config.attention.prefill == "a"
    assert config.names("attention.decode") == ("b", "auto")
    assert config.names("attention.draft.prefill") is None
    assert config.rung("attention.prefill") == ("file", str(path))


def test_the_ladder_decides_key_by_key_and_names_its_rung(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[tool.attnplug.attention]\nprefill = "p"\ndecode = "p"\nlinear = "p"\npage_size = 1\n'
    )
    path = tmp_path / "attn.toml"
    path.write_text('[attention]\nprefill = "f"\ndecode = "f"\nlinear = "f"\n')
    env = {"ATTNPLUG_PREFILL": "e", "ATTNPLUG_DECODE": "e, e2", "HOME": "/"}
    config = load(tmp_path, path, env=env, overrides={"attention.prefill": "c"})
    attention = config.attention
    assert (attention.prefill, attention.decode, attention.linear, attention.page_size) == ("c", ["e", "e2"], "f", 1)
    keys = ("prefill", "decode", "linear", "page_size", "kv_dtype")
    assert [tuple(config.rung(f"attention.{key}")) for key in keys] == [
        ("command line", "--prefill"),
        ("environment", "ATTNPLUG_DECODE"),
        ("file", str(path)),
        ("pyproject", str(tmp_path / "pyproject.toml")),
        ("auto", ""),
    ]


def test_the_nearest_pyproject_with_our_table_upward_is_read(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.attnplug.attention]\nprefill = "p"\n')
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "pyproject.toml").write_text("[tool.other]\nx = 1\n")
    assert load(inner).attention.prefill == "p"


def test_the_environment_may_name_the_file(tmp_path):
    path = tmp_path / "attn.json"
    path.write_text('{"attention": {"prefill": "f"}}')
    assert load(tmp_path, env={"ATTNPLUG_CONFIG": str(path)}).attention.prefill == "f"


def test_each_variable_reaches_its_key(tmp_path):
    env = {
        "ATTNPLUG_PAGE_SIZE": "64",
        "ATTNPLUG_KV_DTYPE": "float16",
        "ATTNPLUG_FALLBACK": "listed",
        "ATTNPLUG_BLOCK": "x",
        "ATTNPLUG_ALLOW": "y,z",
        "ATTNPLUG_STRICT": "1",
        "ATTNPLUG_GRAPHS": "off",
        "ATTNPLUG_DRAFT_DECODE": "d",
    }
    config = load(tmp_path, env=env)
    attention, plugins = config.attention, config.plugins
    assert (attention.page_size, attention.kv_dtype, attention.fallback) == (64, "float16", "listed")
    assert (plugins.block, plugins.allow, plugins.strict) == (("x",), ("y", "z"), True)
    assert (attention.graphs, attention.draft.decode) == ("off", "d")


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"ATTNPLUG_PREFIL": "a"}, "did you mean 'ATTNPLUG_PREFILL'"),
        ({"ATTNPLUG_PAGE_SIZE": "big"}, "ATTNPLUG_PAGE_SIZE: attention.page_size is 'big'; allowed: "),
        ({"ATTNPLUG_PAGE_SIZE": "--5"}, "attention.page_size is '--5'; allowed: a whole number"),
        ({"ATTNPLUG_PAGE_SIZE": "9" * 5000}, "attention.page_size is '9999"),
        ({"ATTNPLUG_STRICT": "maybe"}, "allowed: 1, true"),
        ({"ATTNPLUG_FALLBACK": "sometimes"}, "ATTNPLUG_FALLBACK: attention.fallback is 'sometimes'; allowed: 'never'"),
    ],
)
def test_a_wrong_variable_is_an_error_that_names_it(tmp_path, env, said):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, env=env)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("tables", "key", "said"),
    [
        ({"attention": {"prefil": "a"}}, "attention.prefil", "did you mean 'attention.prefill'?"),
        ({"prefill": "a"}, "prefill", "did you mean 'attention.prefill' or 'attention.draft.prefill'?"),
        ({"atention": {}}, "atention", "did you mean 'attention'?"),
        ({"attention": {"draft": {"decoder": "a"}}}, "attention.draft.decoder", "'attention.draft.decode'"),
        ({"attention": {"page_size": "16"}}, "attention.page_size", "is '16'; allowed: a whole number or 'auto'"),
        ({"attention": {"page_size": 0}}, "attention.page_size", "is 0; allowed: ≥ 1"),
        ({"attention": {"page_size": True}}, "attention.page_size", "is True"),
        ({"attention": {"prefill": 3}}, "attention.prefill", "is 3; allowed: a text or a list of names"),
        ({"attention": {"prefill": []}}, "attention.prefill", "a list that is not empty"),
        ({"attention": {"prefill": ""}}, "attention.prefill", "allowed"),
        ({"attention": {"kv_dtype": "int4"}}, "attention.kv_dtype", "'bfloat16'"),
        ({"attention": 3}, "attention", "is 3; allowed: a table"),
        ({"plugins": {"strict": "yes"}}, "plugins.strict", "allowed: true or false"),
        ({"backend": {"b": 3}}, "backend.b", "is 3; allowed: a table"),
        ({"requires": {"pluggy": "one"}}, "requires", "not version ranges: pluggy = 'one'"),
        ({"provider": {"b": 3}}, "provider.b", "is 3; allowed: a text"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else "",
)
def test_a_wrong_key_or_value_is_one_clear_error(tables, key, said):
    with pytest.raises(ConfigError) as caught:
        AttentionConfig.model_validate(tables)
    assert caught.value.key == key
    assert said in caught.value.message


def test_all_faults_are_told_at_once_with_their_file(tmp_path):
    path = tmp_path / "attn.toml"
    path.write_text('[attention]\nprefil = "a"\npage_size = "x"\n[plugin]\nblock = []\n')
    with pytest.raises(ConfigError) as caught:
        AttentionConfig.from_file(path)
    lines = caught.value.message.splitlines()
    assert len(lines) == 3
    assert all(line.startswith(f"{path}: ") for line in lines)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("absent.toml", None, "cannot read"),
        ("a.ini", "", "allowed: .toml"),
        ("a.toml", "x = ", "not valid TOML"),
        ("a.json", "{", "not valid JSON"),
        ("a.yaml", "a: [", "not valid YAML"),
        ("b.yaml", "[1]", "holds a list"),
        ("c.yaml", "&a\nattention: *a\n", "nested too deeply"),
        ("d.json", "[" * 100_000, "nested too deeply"),
        ("e.json", '{"attention": {"page_size": 1, "page_size": 2}}', "key 'page_size' is given twice"),
        ("f.yaml", "attention:\n  page_size: 1\n  page_size: 2\n", "key 'page_size' is given twice"),
        ("pyproject.toml", 'tool = "tool.attnplug"', r"\[tool.attnplug\] of .* is not a table"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, said):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=said) as caught:
        AttentionConfig.from_file(path)
    assert caught.value.source == str(path)


def test_an_empty_file_is_the_default(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("")
    assert AttentionConfig.from_file(path) == AttentionConfig()


def test_every_violation_of_requires_is_told_at_once():
    config = AttentionConfig.model_validate({"requires": {"pluggy": "<1", "no-such-dist": ">=2", "pytest": ">=1"}})
    with pytest.raises(ConfigError) as caught:
        config.check_requires()
    assert "requires.pluggy: asked <1" in caught.value.message
    assert "requires.no-such-dist: asked >=2, not installed" in caught.value.message
    assert "pytest" not in caught.value.message
    assert caught.value.remedy == "pip install 'pluggy<1' 'no-such-dist>=2'"


def test_a_value_given_in_code_says_so():
    config = AttentionConfig.model_validate({"attention": {"prefill": "a"}})
    assert (config.rung("attention.prefill").name, config.rung("attention.decode").name) == ("code", "auto")


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    path = tmp_path / "attn.toml"
    path.write_text(TOML, encoding="utf-8-sig")
    assert AttentionConfig.from_file(path).attention.page_size == 16


def test_merged_keys_of_yaml_are_not_given_twice(tmp_path):
    path = tmp_path / "attn.yaml"
    path.write_text("plugins: &p {strict: true}\nattention: {<<: {page_size: 1}, page_size: 2}\n")
    assert AttentionConfig.from_file(path).attention.page_size == 2


def test_an_empty_path_is_no_file_and_not_the_environments(tmp_path):
    with pytest.raises(ConfigError, match="suffix ''"):
        load(tmp_path, "", env={"ATTNPLUG_CONFIG": "attn.toml"})


def test_a_wrong_option_is_named_as_it_was_typed(tmp_path):
    with pytest.raises(ConfigError, match=r"^--plugin: plugins\.load is ''"):
        load(tmp_path, overrides={"plugins.load": [""]})
