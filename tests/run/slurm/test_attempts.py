"""restarts.jsonl: causes, counts and crash loops."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from dppo_megatron.config import save_resolved
from dppo_megatron.run.launch.evaluate import with_settings
from dppo_megatron.run.slurm import job
from dppo_megatron.run.slurm.allocation import Allocation
from dppo_megatron.run.slurm.attempts import LOST, TIME_LIMIT, AttemptLog
from dppo_megatron.run_dir import RunDir
from tests.support.slurm.config import config


@pytest.fixture
def run(tmp_path) -> RunDir:
    return RunDir(tmp_path / "run")


def attempt(run, restart, end, cause, checkpoint=None):
    """One attempt of job 7, with the checkpoint that it saved."""
    log = AttemptLog(run)
    log.record("started", "", job="7", restart=restart)
    if checkpoint is not None:
        run.checkpoints.mkdir(exist_ok=True)
        (run.checkpoints / "latest").write_text(f"step-{checkpoint:06d}")
    if end:
        log.record(end, cause, job="7", restart=restart)


def test_attempts_without_a_new_checkpoint_are_counted_whatever_ended_them(run):
    log = AttemptLog(run)
    attempt(run, 0, "requeued", "trainer: exit code 1", checkpoint=2)
    assert log.without_progress() == 0
    attempt(run, 1, "requeued", "trainer: exit code 1")
    attempt(run, 2, "requeued", TIME_LIMIT)
    assert log.why_restarted() == TIME_LIMIT
    attempt(run, 3, "", "")
    assert log.why_restarted() == LOST
    assert (log.without_progress(), log.restarts()) == (3, 3)
    attempt(run, 4, "requeued", TIME_LIMIT, checkpoint=4)
    assert log.without_progress() == 0
    attempt(run, 5, "requeued", "engine-0: exit code 1")
    attempt(run, 0, "", "")  # submitted again
    assert log.without_progress() == 1


def test_nodes_that_the_newest_job_avoids(run):
    log = AttemptLog(run)
    assert log.excluded() == []
    log.record("requeued", "preflight", job="6", restart=0, excluded=("a",))
    log.record("requeued", "preflight", job="7", restart=0, excluded=("c", "b"))
    log.record("requeued", "preflight", job="7", restart=1, excluded=("d",))
    assert log.excluded() == ["b", "c", "d"]


@pytest.mark.parametrize("job", ["7", "7_12"])
def test_a_task_of_a_job_array_finds_its_recorded_events(run, job):
    AttemptLog(run).record("started", "submitted", job=job, restart=0)
    assert [event.job for event in AttemptLog(run).events()] == [job]


def test_a_requeued_job_goes_on_with_its_run_whatever_became_of_the_file(tmp_path, monkeypatch):
    """The user writes the next experiment into the file that was submitted, or removes it."""
    attempts = []

    def attempt(config, allocation, *, resume):
        attempts.append((config.run.dir, config.optimizer.lr, resume))
        return Mock(**{"run.return_value": 0})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "Job", attempt)
    monkeypatch.setattr(job, "refuse_second_job", lambda *_: None)
    file = tmp_path / "config.yaml"

    def start(number, restart):
        monkeypatch.setattr(Allocation, "current", lambda: Allocation(number, restart, (("a", "b", "c"),)))
        return job.run_job(Path("config.yaml"), (), resume=False)

    one = config()
    save_resolved(one, file)
    start("7", 0)
    save_resolved(with_settings(one, run={"dir": Path("two")}, optimizer={"lr": 1e-3}), file)
    start("7", 1)
    start("8", 0)
    file.unlink()
    start("7", 2)
    mine = tmp_path / "run", 1e-6
    assert attempts == [(*mine, False), (*mine, True), (tmp_path / "two", 1e-3, False), (*mine, True)]
