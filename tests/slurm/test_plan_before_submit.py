"""The examples and the nodes they request; a run that does not fit its GPUs is refused before it is submitted."""

from __future__ import annotations

from pathlib import Path

import pytest

from dppo_megatron.checks import load_config
from dppo_megatron.checks.slurm import problems as slurm_problems
from dppo_megatron.config import ConfigError
from dppo_megatron.slurm.submit import check_config, check_memory
from tests.support.configs import make_config

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["qwen3_8b", "qwen3_30b_a3b", "deepseek_v3"])
def test_the_multi_node_examples_ask_for_the_nodes_they_use(name):
    config = load_config(EXAMPLES / name / "config.yaml")
    assert slurm_problems(config) == []
    assert config.slurm.engine_nodes > 0


@pytest.mark.parametrize(("gpus", "said"), [(8, True), (0, False)])
def test_that_memory_was_not_checked_is_said(monkeypatch, gpus, said):
    monkeypatch.setattr("dppo_megatron.slurm.submit.preflight", lambda *_, **__: ["the method"])
    notes = check_config(make_config(slurm={"gpus_per_node": gpus}), "config.yaml", place="elsewhere")
    assert (
        any("slurm.gpu is not set: whether the GPUs' memory suffices was not checked" in note for note in notes) == said
    )


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_refused_with_its_plan(monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    config = load_config(EXAMPLES / "qwen3_8b" / "config.yaml", ["slurm.gpu=a100-40"])
    with pytest.raises(ConfigError, match=r"slurm.gpu = a100-40: does not fit\n(.|\n)*needed"):
        check_memory(config, "qwen3_8b")
