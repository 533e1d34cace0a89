"""benchmarks/scale.py at a small size: all of its parts run, and its figures match the data read and stored."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import environment

ROOT = Path(__file__).parents[2]
SMALL = ("--samples", "64", "--tokens", "1024", "--engines", "4", "--readers", "8", "--rate", "500", "--train-s", "1")


def measured(directory: Path, *arguments: str) -> str:
    command = [sys.executable, ROOT / "benchmarks" / "scale.py", "--directory", directory, *SMALL, *arguments]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def rows(text: str, heading: str) -> list[list[float]]:
    """The rows of numbers below a line that begins with `heading`."""
    lines = iter(text.split(f"\n{heading}")[1].splitlines()[1:])
    found = []
    for line in lines:
        if not re.fullmatch(r"[\d. ]+", line):
            break
        found.append([float(word) for word in line.split()])
    return found


@pytest.mark.slow
def test_every_rank_reads_its_share_of_every_step_although_engines_fail(tmp_path):
    text = measured(tmp_path / "scale", "--steps", "3", "--stall", "1", "--die", "1", "--fault-s", "4")
    steps, disk = rows(text, "step  wait s"), rows(text, "step  disk alone")
    assert [row[0] for row in steps] == [row[0] for row in disk] == [0, 1, 2]
    assert all(0 <= row[6] <= 1 for row in steps)  # staleness
    assert all(1 <= row[4] < 3 for row in disk)  # bytes that the ranks asked for, of those stored
    orchestrator = re.search(r"^orchestrator +(\d+) +(\d+)", text, re.MULTILINE)
    assert 0 < int(orchestrator[1]) < 2000
    assert "plan" in text
    assert int(re.search(r"deaths (\d+)", text)[1]) >= 1
