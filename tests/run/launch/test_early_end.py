"""A trainer that was asked to stop exits 0, as one that is done does: how the two kinds of run tell them apart."""

import sys
from unittest.mock import Mock

import pytest

from dppo_megatron.config import Config, save_resolved
from dppo_megatron.run.launch import local_processes
from dppo_megatron.run.launch.launcher import RunPlan
from dppo_megatron.run.launch.local_run import LocalRun
from dppo_megatron.run.slurm.allocation import Allocation
from dppo_megatron.run.slurm.attempts import AttemptLog
from dppo_megatron.run.slurm.job import Job
from dppo_megatron.run_dir import RunDir
from tests.support.configs import make_config


@pytest.fixture
def config(tmp_path) -> Config:
    """The config of a run of 9 steps that was saved after step 4."""
    config = make_config(
        run={"dir": tmp_path / "run"}, train={"steps": 9}, engine={"count": 1}, slurm={"max_restarts": 0}
    )
    run = RunDir(config.run.dir)
    run.checkpoints.mkdir(parents=True)
    (run.checkpoints / "latest").write_text("step-000004")
    save_resolved(config, run.config)
    return config


@pytest.mark.parametrize(("saved", "event", "code"), [("step-000004", "failed", 1), ("step-000009", "completed", 0)])
def test_a_job_is_complete_with_its_last_step_only(config, monkeypatch, saved, event, code):
    monkeypatch.setattr(Job, "_still_running", lambda self: True)
    run = RunDir(config.run.dir)
    (run.checkpoints / "latest").write_text(saved)
    launcher = Mock()
    launcher.start.return_value.poll.return_value = 0  # every step has ended when it starts
    monkeypatch.setattr("dppo_megatron.run.slurm.job.StepLauncher", lambda *_: launcher)
    job = Job(config, Allocation("7", 0, (("a",),)), resume=False)
    job._driver.start(RunPlan(engines=[], orchestrator="orchestrator", trainers=["trainer"]))
    AttemptLog(run).record("started", "submitted", job="7", restart=0)
    assert job._watch() == code
    last = AttemptLog(run).events()[-1]
    assert last.event == event
    assert code == 0 or "the trainer was asked to stop, not by this job, at step 4 of 9" in last.cause


def test_a_run_on_one_machine_that_ends_early_names_its_step(config, monkeypatch):
    """The orchestrator would wait for the trainer."""

    def command(role, *_):
        return [sys.executable, "-c", f"import time; time.sleep({15 if role == 'orchestrator' else 0})"]

    monkeypatch.setattr(local_processes, "dppo_command", command)
    monkeypatch.setattr(local_processes, "engine_names", lambda config: [])
    assert LocalRun(config, local_processes.local_plan(config, resume=False)).run() == 1
    log = RunDir(config.run.dir).log("train").read_text()
    assert "asked to stop, not by this command, at step 4 of 9; resume with" in log
