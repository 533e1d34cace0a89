"""A command outlives the reader of its output."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
