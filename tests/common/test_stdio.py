"""A command outlives the reader of its output, and a terminal breaks no word."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from dppo_megatron.common.stdio import at_words

BODY = """
import subprocess, sys
from dppo_megatron.common.stdio import outlive_readers
outlive_readers()
print('first', flush=True)
sys.stdin.read()
for stream in (sys.stdout, sys.stderr):
    print('\\udcff' * 100_000, file=stream, flush=True)
sys.exit(subprocess.run([sys.executable, '-c', 'print(1, flush=True)']).returncode)
"""


@pytest.mark.parametrize("closed", [True, False])
def test_a_command_ends_as_usual_after_its_reader(closed):
    process = subprocess.Popen(
        [sys.executable, "-c", BODY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout.readline() == b"first\n"
    if closed:
        process.stdout.close()
    process.stdin.close()
    assert closed or process.stdout.read() == b"\\udcff" * 100_000 + b"\n1\n"
    assert process.wait(30) == 0


@pytest.mark.parametrize("width", [80, 100])
def test_a_terminal_gets_lines_that_end_between_words(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    text = f"grpo: a policy {'held-out ' * 30}\n  - two: {'x' * 200}\n\nend"
    file, terminal = io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True
    assert at_words(text, file) == text
    lines = at_words(text, terminal).splitlines()
    assert [len(line) <= width for line in lines].count(False) == 1  # the word that is longer than a line
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    assert not any(line.rstrip().endswith("held-") for line in lines)
