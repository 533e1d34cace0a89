"""A job whose trainer always fails, on a real Slurm: restarted as often as allowed, then ended with the reason."""

from __future__ import annotations

import sys

import pytest
from slurm_runs import Run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

STUB = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
role = sys.argv[2]
if role == "trainer" and os.environ["SLURM_PROCID"] == "1":
    time.sleep(1)
    sys.exit("rank ran into a wall")
time.sleep(0 if role == "check" else 600)
"""


def test_a_crash_loop_of_a_heterogeneous_job_stops_with_the_reason(lab, task, tmp_path):
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    changes = {"heterogeneous": True, "max_restarts": 1, "command": [sys.executable, str(stub)]}
    run = Run.write(lab, task, tmp_path, slurm=changes)
    run.sbatch("train_hetjob.sbatch", "--nodes=2", "--gpus-per-node=1", ":", "--nodes=1", "--gpus-per-node=1")
    assert run.wait_for_end() == "FAILED"
    job = run.lab.job(run.job)
    assert (job["ExitCode"], job["Restarts"]) == ("1:0", "1")
    output = run.output.read_text()
    assert "rank ran into a wall" in output
    assert "trainer: exit code 1; 2 lives in a row saved no new checkpoint, slurm.max_restarts = 1" in output
    assert [(e.event, e.restart) for e in run.events()] == [
        ("started", 0), ("requeued", 0), ("started", 1), ("failed", 1),
    ]  # fmt: skip
    assert run.events()[2].cause == "trainer: exit code 1"
