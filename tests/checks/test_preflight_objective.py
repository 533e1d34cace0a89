"""What is said of the objective before anything starts."""

from __future__ import annotations

import pytest

from dppo_megatron.checks import preflight
from dppo_megatron.config import ConfigError
from tests.support.configs import make_config


def problems(tmp_path, **objective) -> str:
    """Of a config with this objective; the model and the data are missing too, and reported beside it."""
    config = make_config(
        run={"dir": tmp_path / "run"},
        model={"path": tmp_path / "model"},
        data={"train": tmp_path / "train.jsonl"},
        objective=objective,
    )
    with pytest.raises(ConfigError) as raised:
        preflight(config, "config.yaml")
    assert any("model.path" in violation for violation in raised.value.violations)
    return "\n".join(raised.value.violations)


def test_a_topk_method_needs_topk_log_probs(tmp_path):
    assert "rollout.topk_logprobs = 0: objective dppo_topk_tv compares top-K tokens" in problems(
        tmp_path, name="dppo_topk_tv"
    )


def test_a_supervised_objective_under_another_name_is_refused_and_the_reverse(tmp_path):
    sampled = problems(tmp_path, name="pg_is", settings={"supervised": True, "importance": "none"})
    assert "objective.settings.supervised = true: objective.name = pg_is learns from sampled rollouts" in sampled
    given = problems(tmp_path, name="nll", settings={"supervised": False})
    assert "objective.settings.supervised = false: objective.name = nll learns from given answers" in given
    assert ".supervised" not in problems(tmp_path, name="nll")


def test_an_objective_that_cannot_describe_itself_is_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "speechless.py").write_text(
        "from dppo_megatron.objectives import Objective, ObjectiveSettings\n"
        "class Speechless(Objective):\n    def describe(self):\n        return self.words\n"
        "mine = Speechless('mine', ObjectiveSettings(delta=0.1))\n"
    )
    assert "objective.name = speechless:mine: describe() failed: AttributeError" in problems(
        tmp_path, name="speechless:mine"
    )
