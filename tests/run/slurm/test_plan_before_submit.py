"""The examples and the nodes they request; a run that does not fit its GPUs is refused before it is submitted."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dppo_megatron.cli.cluster import app
from dppo_megatron.config import ConfigError
from dppo_megatron.errors import ExpectedError
from dppo_megatron.run.checks import load_config
from dppo_megatron.run.checks.slurm import problems as slurm_problems
from dppo_megatron.run.slurm.step import steps_of_job
from dppo_megatron.run.slurm.submit import check_config, check_memory
from tests.support.configs import make_config
from tests.support.slurm.config import config as two_and_one

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("name", ["qwen3_8b", "qwen3_30b_a3b", "deepseek_v3"])
def test_the_multi_node_examples_ask_for_the_nodes_they_use(name):
    config = load_config(EXAMPLES / name / "config.yaml")
    assert slurm_problems(config) == []
    assert config.slurm.engine_nodes > 0


@pytest.mark.parametrize(("gpus", "said"), [(8, True), (0, False)])
def test_a_memory_check_that_was_skipped_is_reported(monkeypatch, gpus, said):
    monkeypatch.setattr("dppo_megatron.run.slurm.submit.preflight", lambda *_, **__: ["the method"])
    notes = check_config(make_config(slurm={"gpus_per_node": gpus}), "config.yaml", place="elsewhere")
    assert any("slurm.gpu is not set: the GPUs' memory was not checked" in note for note in notes) == said


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_refused_with_its_plan(monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    config = load_config(EXAMPLES / "qwen3_8b" / "config.yaml", ["slurm.gpu=a100"])
    with pytest.raises(ExpectedError, match=r"slurm.gpu = a100: known are a100-40"):
        check_memory(config, config.slurm.gpu, "config.yaml")
    config = load_config(EXAMPLES / "qwen3_8b" / "config.yaml", ["slurm.gpu=a100-40"])
    with pytest.raises(ConfigError, match=r"slurm.gpu = a100-40: does not fit\n(.|\n)*needed"):
        check_memory(config, config.slurm.gpu, "qwen3_8b")


@pytest.mark.parametrize("model", ["/nowhere", "examples/models/r1-distill-qwen-1.5b"])
def test_a_dry_run_needs_no_weights_or_data_and_shows_the_steps(monkeypatch, tmp_path, model):
    monkeypatch.chdir(EXAMPLES.parent)
    options = ["--set", f"model.path={model}", "--set", f"run.dir={tmp_path}/run", "--dry-run"]
    command = ["slurm", str(EXAMPLES / "papers/dppo_1.5b.yaml"), *options]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.exception
    assert f"not checked: model.path = {EXAMPLES.parent / model}: " in shown.stderr
    for setting in ("data.train", "eval.sets.aime24.path", "eval.sets.aime25.path"):
        assert f"not checked: {setting} = " in shown.stderr
    assert ("rank 0 (stage 0" in shown.stderr) == (model != "/nowhere")  # the plan reads config.json
    assert "\n  node1: driver, check, preflight, engine-0 (GPUs 0-0), " in shown.stderr
    assert shown.stdout.startswith("#!/usr/bin/env bash\n")
    assert shown.stdout.endswith(f"slurm-job {tmp_path}/run/config.yaml\n")
    assert not list(tmp_path.iterdir())


def test_a_dry_run_without_weights_refuses_settings_that_contradict_config_json(monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    command = ["slurm", str(EXAMPLES / "papers/dppo_1.5b.yaml"), "--dry-run"]
    command += ["--set", "rollout.stop_token_ids=[999999]"]
    (problem,) = CliRunner().invoke(app, command).exception.violations
    assert problem.startswith("rollout.stop_token_ids = 999999")


@pytest.mark.parametrize("heterogeneous", [False, True])
def test_the_steps_name_the_work_of_every_node(heterogeneous):
    lines = steps_of_job(two_and_one(heterogeneous=heterogeneous), resume=True).splitlines()
    engines = ", ".join(f"engine-{i} (GPUs {2 * i}-{2 * i + 1})" for i in range(4))
    assert lines[1:4] == [
        "  node1: driver, check, preflight, orchestrator, trainer ranks 0-7",
        "  node2: preflight, trainer ranks 8-15",
        f"  node3: preflight, {engines}",
    ]
    steps = [line.split()[1:4] for line in lines[5:]]
    names = ["check", "preflight", "preflight", *(f"engine-{i}" for i in range(4)), "orchestrator", "trainer"]
    assert [step[0] for step in steps] == [f"--job-name={name}" for name in names]
    assert [step[1] for step in steps if heterogeneous] == [f"--het-group={g}" for g in "001111100" if heterogeneous]
    assert "slurm-task trainer --resume" in lines[-1]
