"""restarts.jsonl: causes, counts, and what is a crash loop."""

from __future__ import annotations

import pytest

from dppo_megatron.run_dir import RunDir
from dppo_megatron.slurm.lives import LOST, TIME_LIMIT, Lives


@pytest.fixture
def run(tmp_path) -> RunDir:
    return RunDir(tmp_path / "run")


def life(run, restart, end, cause, checkpoint=None):
    """One life of job 7, with the checkpoint that it saved."""
    lives = Lives(run)
    lives.record("started", "", job="7", restart=restart)
    if checkpoint is not None:
        run.checkpoints.mkdir(exist_ok=True)
        (run.checkpoints / "latest").write_text(f"step-{checkpoint:06d}")
    if end:
        lives.record(end, cause, job="7", restart=restart)


def test_lives_without_a_new_checkpoint_are_counted_whatever_ended_them(run):
    lives = Lives(run)
    life(run, 0, "requeued", "trainer: exit code 1", checkpoint=2)
    assert lives.without_progress() == 0
    life(run, 1, "requeued", "trainer: exit code 1")
    life(run, 2, "requeued", TIME_LIMIT)
    life(run, 3, "", "")
    assert (lives.without_progress(), lives.restarts()) == (3, 3)
    life(run, 4, "requeued", TIME_LIMIT, checkpoint=4)
    assert lives.without_progress() == 0


def test_submitting_again_counts_anew(run):
    for restart in range(3):
        life(run, restart, "requeued", "engine-0: exit code 1")
    life(run, 0, "", "")
    assert Lives(run).without_progress() == 1


def test_a_life_that_could_not_say_why_it_ended_was_ended_by_slurm(run):
    life(run, 0, "requeued", TIME_LIMIT)
    assert Lives(run).why_restarted() == TIME_LIMIT
    life(run, 1, "", "")
    assert Lives(run).why_restarted() == LOST
