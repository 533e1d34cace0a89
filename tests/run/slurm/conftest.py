"""One Slurm for all tests of this directory, and the task they train on."""

import signal
from pathlib import Path

import pytest

from dppo_megatron.run.slurm import task as job_task
from tests.support.runs import write_task
from tests.support.slurm.lab import Lab, why_not


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> Lab:
    if reason := why_not():
        pytest.skip(reason)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a suite that is ended ends its Slurm, too
    lab = Lab(tmp_path_factory.mktemp("slurm") / "lab")
    yield lab
    lab.close()


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> Path:
    """The quickstart's task with a held-out set small enough for tests."""
    return write_task(tmp_path_factory.mktemp("task"), heldout=8)  # fewer than the reward delays


@pytest.fixture
def child_environments(monkeypatch) -> list[dict]:
    """Environment, name and command of each child that a task of a job step would start, on a node at 10.0.0.1."""
    started: list[dict] = []

    def start(name, command, log, environment):
        started.append({**environment, "name": name, "command": command})

    monkeypatch.setattr(job_task, "node_address", lambda config: "10.0.0.1")
    monkeypatch.setattr(job_task, "rendezvous", lambda *_: job_task.MasterAddress("10.0.0.1", 20000))
    monkeypatch.setattr(job_task, "Child", start)
    monkeypatch.setattr(job_task, "_wait_and_report", lambda child, task: 0)
    monkeypatch.setattr(job_task.signal, "pthread_sigmask", lambda *_: None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return started
