"""Whole runs with other ways to move weights and to sample: broadcast, asynchronous, colocated, bf16 engines."""

from __future__ import annotations

import pytest

from dppo_megatron.bank import BankReader
from tests.support.runs import GROUPS, STEPS, config_tree, records, run, steps_done, write_config

pytestmark = pytest.mark.engines
VARIANTS = {
    "broadcast": {"weight_sync": {"transport": "broadcast"}},
    "asynchronous": {
        "weight_sync": {"transport": "broadcast"},
        "rollout": {"max_staleness": 2, "on_update": "abort", "beyond_bound": "drop"},
    },
    "colocated": {"engine": {"placement": "colocated"}},
    "bf16_engine": {
        "engine": {"dtype": "bf16"},
        "weight_sync": {"probe_tolerance": 0.3},
        "rollout": {"max_mismatch_kl": 0.1},
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_trains_to_its_end(task, tmp_path, name):
    tree = config_tree(task, tmp_path / "run")
    for section, settings in VARIANTS[name].items():
        tree[section] = tree.get(section, {}) | settings
    run("train", write_config(tree, tmp_path / "c.yaml"))
    assert steps_done(tmp_path / "run") == list(range(1, STEPS + 1))
    trained = [r for r in records(tmp_path / "run") if "time/step_s" in r]
    assert all(r["train/grad_norm"] > 0 for r in trained)
    lag = max(r["rollout/staleness_max"] for r in trained)
    assert lag <= tree["rollout"].get("max_staleness", 0)
    exact = name != "bf16_engine"
    assert all((r["probe/max_abs_logprob_difference"] < 1e-4) == exact for r in trained)
    if name != "asynchronous":
        assert all((r["mismatch/max_abs_logprob_difference"] < 1e-4) == exact for r in trained)
    reader = BankReader(tmp_path / "run" / "bank")
    assert reader.refresh() == STEPS * GROUPS
    assert all("abort" not in entry.finish_reasons for entry in reader.entries(0, STEPS * GROUPS))


def test_a_mismatch_beyond_the_limit_ends_the_run(task, tmp_path):
    tree = config_tree(task, tmp_path / "run")
    tree["engine"]["dtype"] = "bf16"
    tree["weight_sync"] = {"probe_tolerance": 0.3}
    tree["rollout"]["max_mismatch_kl"] = 1e-9
    result = run("train", write_config(tree, tmp_path / "c.yaml"), check=False)
    assert result.returncode == 1
    assert "rollout.max_mismatch_kl = 1e-09" in result.stdout
    assert steps_done(tmp_path / "run") == []
