"""A whole run in turns with an environment, trained and evaluated."""

from __future__ import annotations

import pytest

from dppo_megatron.bank import BankReader
from tests.support.audit import audit
from tests.support.runs import GROUPS, SAMPLES, STEPS, config_tree, records, run, steps_done, write_config

TURNS = 3


@pytest.mark.slow
def test_a_run_of_several_turns_trains_to_its_end(task, engine, tmp_path):
    tree = config_tree(task, tmp_path / "run", urls=(engine.url,))
    tree["rollout"] |= {"max_response_tokens": 40, "stop_token_ids": [2, 3, 4, 5, 6], "max_staleness": 1}
    tree["environment"] = {"name": "tests.environments.worlds:Unscored", "settings": {"turns": TURNS}, "workers": 4}
    run("train", write_config(tree, tmp_path / "c.yaml"))
    assert steps_done(tmp_path / "run") == list(range(1, STEPS + 1))
    found = records(tmp_path / "run")
    trained = [r for r in found if "time/step_s" in r]
    assert all(r["train/grad_norm"] > 0 for r in trained)
    assert all(r["mismatch/max_abs_logprob_difference"] < 1e-4 for r in trained if r["rollout/staleness_max"] == 0)
    assert all(1 <= r["environment/turns_mean"] <= TURNS for r in found if "environment/turns_mean" in r)
    assert {r["step"] for r in found if "eval/accuracy" in r} >= {0, STEPS}
    reader = BankReader(tmp_path / "run" / "bank")
    checked = audit(reader.read(entry) for entry in reader.entries(0, reader.refresh()))
    assert checked.problems == []
    assert checked.counts["trajectories"] == STEPS * GROUPS * SAMPLES
    assert checked.counts["turns"] > checked.counts["trajectories"]
    assert sum(r["rollout/response_tokens_mean"] for r in trained) * GROUPS * SAMPLES == pytest.approx(
        checked.counts["policy tokens"]
    )
