"""What the documents say is true: their snippets run, their links lead somewhere, their tables have every name."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from attnplug import errors, members, sources
from attnplug.backend import AttentionBackend
from attnplug.cli.commands import available
from attnplug.config import AttentionConfig
from attnplug.entry import State
from attnplug.modes import ForwardMode, SharedReadEnds
from attnplug.spec import Feature
from attnplug.testing.axes import AXES
from doc_snippets import EVALUATED, FOR_PEOPLE, first_missing, parser
from workspace import DISTRIBUTIONS, ROOT

DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(dist.folder / "README.md" for dist in DISTRIBUTIONS),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
FENCE = re.compile(r"^ *```+ *([^\s`]*)", flags=re.MULTILINE)

each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def text_of(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def table_rows(text):
    """Return the cells of every table row, rulers and headings included, code marks and bold removed."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def names_in_first_column(text):
    return {name for row in table_rows(text) for name in re.findall(r"`([^`]+)`", row[0])}


@each_document
def test_every_snippet_of_a_document_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("demo", "core", "plugins", "engines"):
        if (ROOT / folder).exists():
            (tmp_path / folder).symlink_to(ROOT / folder)
    for example in parser().parse(path).examples():
        example.evaluate()


@each_document
def test_every_fence_of_a_document_names_a_language_that_is_checked_or_for_people(path):
    opening = FENCE.findall(path.read_text(encoding="utf-8"))[::2]
    assert set(opening) <= {*EVALUATED, *FOR_PEOPLE}


@each_document
def test_every_link_of_a_document_leads_to_a_file_and_a_heading(path):
    text = path.read_text(encoding="utf-8")
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert broken == []


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_contracts_table_has_every_member_with_its_scope_and_reducer():
    rows = {}
    for row in table_rows(text_of("contract.md")):
        if len(row) == 3 and re.fullmatch(r"\w+, \w+", row[2]):
            rows.update(dict.fromkeys(re.findall(r"`(\w+)", row[0]), row[2]))
    said = {name: f"{member.scope.value}, {member.reducer.value}" for name, member in members.MEMBERS.items()}
    assert rows == said


def test_the_contracts_table_names_nothing_that_a_backend_lacks():
    instance = set(dir(AttentionBackend)) | set(
        re.findall(r"self\.(\w+)", inspect.getsource(AttentionBackend.__init__))
    )
    assert {"spec", "env"} <= instance
    assert set(members.MEMBERS) <= instance | {"spec", "env"}


def test_the_contract_has_every_mode_and_every_read_end():
    text = text_of("contract.md")
    assert {mode.name for mode in ForwardMode} <= names_in_first_column(text)
    assert all(f"`{end.name}`" in text for end in SharedReadEnds)


def test_the_contract_has_every_feature():
    assert {feature.name for feature in Feature} <= names_in_first_column(text_of("contract.md"))


def test_the_configuration_page_has_every_key_and_every_variable():
    def keys(model: type[BaseModel], prefix: str):
        for name, field in model.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from keys(inner, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"

    said = names_in_first_column(text_of("config.md"))
    tables = {"backend": "backend.NAME", "requires": "requires.DISTRIBUTION", "provider": "provider.NAME"}
    assert {tables.get(key, key) for key in keys(AttentionConfig, "")} <= said
    assert {*sources.ENV_KEYS, sources.ENV_CONFIG} <= said


def test_the_conformance_page_has_every_axis():
    rows = {row[0] for row in table_rows(text_of("conformance.md")) if re.match(r"[A-Z] ", row[0])}
    assert rows == {f"{axis.letter} {axis.title}" for axis in AXES.values()}


def test_the_first_page_has_every_distribution():
    said = names_in_first_column((ROOT / "README.md").read_text(encoding="utf-8"))
    assert said == {dist.name for dist in DISTRIBUTIONS}


def test_the_benchmarks_page_has_every_benchmark():
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py") if not path.name.startswith("_")}
    assert set(re.findall(r"\[(\w+\.py)\]", text)) == scripts


def test_the_command_line_page_has_every_command():
    text = text_of("cli.md")
    assert [name for name in available() if f"## `attnplug {name}`" not in text] == []


def test_the_errors_page_has_every_error_and_every_state():
    said = names_in_first_column(text_of("errors.md"))
    family = {
        name
        for name, one in inspect.getmembers(errors, inspect.isclass)
        if issubclass(one, errors.AttnplugError) and one is not errors.AttnplugError
    }
    assert family <= said
    assert {state.value for state in State} <= said


def test_a_console_block_is_compared_in_order_and_an_ellipsis_stands_for_anything():
    printed = ["NAME   STATE", "a      FOUND", "b      READY"]
    assert first_missing(["NAME STATE", "b …"], printed) is None
    assert first_missing(["b …", "a …"], printed) == "a …"
    assert first_missing(["a READY"], printed) == "a READY"
