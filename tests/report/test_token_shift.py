"""tools/draw_token_shift.py on a bank that a model sampled itself."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from dppo_megatron.hf import make_random_hf_model
from tests.support.tiny_task import MODEL, make_task

SOURCE = Path(__file__).parents[2] / "tools" / "draw_token_shift.py"
spec = importlib.util.spec_from_file_location("draw_token_shift", SOURCE)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


@pytest.mark.slow
def test_the_weights_that_sampled_are_no_shift_away_and_others_are(tmp_path, monkeypatch, capsys):
    make_task(tmp_path)
    make_random_hf_model(tmp_path / "other", MODEL, seed=2)

    def run(model: str) -> str:
        picture = tmp_path / f"{model}.png"
        words = ["draw", tmp_path / "bank", "--model", tmp_path / model, "--out", picture, "--groups", "5"]
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        assert tool.main() == 0
        assert picture.stat().st_size > 10_000
        return capsys.readouterr().out

    own, other = run("model"), run("other")
    assert " tokens of 5 groups, 0 left out" in own
    assert own.count(": 0.000%") == 2
    assert ": 0.000%" not in other


def test_the_shares_are_of_ratio_and_shift(tmp_path):
    mu = np.log(np.array([0.001, 0.99, 0.5, 0.5], np.float32))
    pi = np.log(np.array([0.02, 0.80, 0.5, 0.9], np.float32))
    shares = list(tool.draw(mu, pi, tmp_path / "x.png").values())
    assert shares == [0.5, 0.5]  # PPO clips the first and the last, DPPO masks the second and the last
