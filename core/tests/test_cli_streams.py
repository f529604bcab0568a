"""What the command line does where its streams or its folder fail it: no traceback, and exit 2 if nothing was told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnplug.cli import main

PROGRAM = [sys.executable, "-m", "attnplug"]
FULL = Path("/dev/full")


def test_a_reader_that_closes_the_pipe_sees_no_traceback():
    process = subprocess.Popen([*PROGRAM, "list", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 0


@pytest.mark.skipif(not FULL.exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("command", ["list", "resolve"])
def test_a_full_disk_is_one_message(command):
    with FULL.open("w") as full:
        ended = subprocess.run([*PROGRAM, command], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    assert "No space left" in ended.stderr


def test_a_terminal_of_ascii_reads_every_text():
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run([*PROGRAM, "resolve", "--help"], env=env, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_closed_standard_output_is_none():
    script = f"exec {sys.executable} -m attnplug list >&-"
    ended = subprocess.run(["/bin/sh", "-c", script], stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_working_directory_that_is_gone_holds_no_configuration(dists, capsys, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["list", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"
