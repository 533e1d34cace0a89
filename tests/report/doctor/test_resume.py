"""A resume examines few records of a long run, and finds the same."""

import json

import numpy as np
import pytest
import yaml

from dppo_megatron.report.doctor import Examination
from dppo_megatron.report.doctor.steps import Past
from dppo_megatron.report.tail import sparse
from tests.support.tokenizers import save_character_model

from .runs import GROUPS, HEALTHY_ROW, write_run


@pytest.mark.parametrize("peak", [0.95, 0.05, 0.5])
def test_a_sparse_reading_of_a_long_run_has_the_findings_of_the_whole_file(tmp_path, peak):
    """The mean reward has its extremes in the middle of the run, and the first evaluations are far apart."""
    rng, run = np.random.default_rng(0), tmp_path
    config = {"optimizer": {"lr": 1e-4}, "rollout": {"prompts_per_step": GROUPS}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))

    def record(step: int, reward: float) -> str:
        noise = {name: HEALTHY_ROW[name] * rng.uniform(0.8, 1.2) for name in ("mismatch/kl", "train/entropy")}
        row = HEALTHY_ROW | noise | {"step": step, "time": float(step), "rollout/reward_mean": reward}
        evaluation = {"step": step, "time": float(step), "eval/reward_mean": 0.4 if step < 900 else 0.1}
        return "".join(json.dumps(r) + "\n" for r in ([row, evaluation] if step % 300 == 1 else [row]))

    rewards = rng.uniform(0.3, 0.5, 1000)
    rewards[450:460] = peak
    (run / "metrics.jsonl").write_text("".join(record(step, r) for step, r in enumerate(rewards, 1)))
    few, whole = Examination(run, sparse), Examination(run)
    found = []
    for steps in (range(0), range(1001, 1101), range(1101, 1301)):
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(record(step, 0.45 if step < 1100 else peak / 2) for step in steps)
        found.append([[str(each) for each in e.advance(rollouts=bool(steps))] for e in (few, whole)])
    assert all(of_few == of_whole for of_few, of_whole in found)
    assert sum(len(of_few) for of_few, _ in found) > 1
    assert few.findings == whole.findings
    assert few._past.steps < 0.6 * whole._past.steps
    for name in ("lowest_reward", "highest_reward"):
        assert getattr(few._past, name) == getattr(whole._past, name)
    for name in ("eval/reward_mean", *HEALTHY_ROW):
        for value in (Past.first, Past.recent, Past.last):
            assert value(few._past, name) == value(whole._past, name)


def test_rollouts_of_steps_before_a_resume_are_not_read_once_the_trainer_cut_the_file(tmp_path, monkeypatch):
    run, read = write_run(tmp_path, save_character_model(tmp_path / "model")), []
    monkeypatch.setattr(
        "dppo_megatron.report.doctor.diagnosis._ExaminedRun._entries", lambda _, step: read.append(step) or []
    )
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    examination = Examination(run, sparse)
    examination.advance(rollouts=False)
    (run / "new").write_text("".join(lines[:4]))
    (run / "new").replace(run / "metrics.jsonl")
    examination.advance()
    assert (examination.examined, read) == (4, [])  # a bank with 20,000 steps would be read for minutes
    with (run / "metrics.jsonl").open("a") as file:
        file.write(lines[4])
    examination.advance()
    assert read == [5]
