"""The example trains the model: `make language-model` with fewer steps."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.language_model.model import ROOT

EXAMPLE = Path(__file__).parents[2] / "examples/language_model"


@pytest.mark.language_model
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_model_learns_sums_and_shows_its_answers(task, tmp_path):
    """In 8 steps."""
    model = (task / "random_model").resolve()
    (tmp_path / ROOT).mkdir(parents=True)
    (tmp_path / ROOT / model.name).symlink_to(model)
    command = [sys.executable, EXAMPLE / "run.py", "--set", "train.steps=8", "--set", "eval.every=0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    accuracy = re.search(r"accuracy: ([0-9.]+)% before, ([0-9.]+)% after", done.stdout)
    assert accuracy, done.stdout + done.stderr
    before, after = map(float, accuracy.groups())
    assert before < 35
    assert after > before + 10, done.stdout
    shown = [re.findall(r"^   ('What is .*?') -> ", part, re.M) for part in done.stdout.split("== answers after")[1:]]
    assert len(shown) == 2
    assert len(shown[0]) == 3
    assert shown[0] == shown[1]
    assert (tmp_path / ROOT / "sums/dppo/report").exists()
