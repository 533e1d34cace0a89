"""Jobs with a fault in the preflight continue without the nodes at fault, or end."""

import json
import sys
from pathlib import Path

import pytest

from tests.run.slurm.test_driver import SERVES, STUB
from tests.support.slurm.faults import FAULTY_NODE, fault_environment
from tests.support.slurm.lab import NODES, wait_until
from tests.support.slurm.runs import Run

pytestmark = pytest.mark.slurm


@pytest.fixture
def job(lab, task, tmp_path):
    """A run with a real preflight, a fault on some nodes, and stubs as other steps."""
    stub, command = tmp_path / "stub.py", tmp_path / "command.sh"
    stub.write_text(STUB + SERVES)
    command.write_text(f'case "$2" in trains | serves) exec bash {FAULTY_NODE} "$@";; esac\n')
    with command.open("a") as file:
        file.write(f'exec {sys.executable} {stub} "$@"\n')
    slurm = {"trainer_nodes": 1, "engine_nodes": 1, "command": ["bash", str(command)], "preflight": True}
    run = Run.write(lab, task, tmp_path, slurm=slurm, parallel={"world_size": 1, "tensor": 1})
    yield run
    lab.run("scancel", run.job, check=False)
    wait_until(lab.idle, "the job to end", 60)


def submit(job: Run, task: Path, monkeypatch, fault: str, nodes: str) -> None:
    for name, value in fault_environment(job, task, fault, nodes).items():
        monkeypatch.setenv(name, value)
    job.sbatch("train.sbatch", "--nodes=2", "--gpus-per-node=1")


def test_a_job_goes_on_without_the_nodes_at_fault(job, task, monkeypatch):
    """One in each of the first two attempts."""
    submit(job, task, monkeypatch, "read_only", "node1 node3")
    assert job.wait_for_end() == "COMPLETED", job.everything()
    assert [(e.event, e.nodes, e.excluded) for e in job.events()] == [
        ("started", ("node1", "node2"), ()),
        ("requeued", (), ("node1",)),
        ("started", ("node2", "node3"), ()),
        ("requeued", (), ("node3",)),
        ("started", ("node2", "node4"), ()),
        ("completed", (), ()),
    ]
    assert "preflight: error: node1: run.dir" in job.events()[1].cause
    assert json.loads(job.command("status", job.directory, "--json"))["excluded_nodes"] == ["node1", "node3"]


def test_a_problem_that_no_other_node_would_cure_fails_the_job(job, task, monkeypatch):
    submit(job, task, monkeypatch, "read_only", " ".join(NODES))
    assert job.wait_for_end() == "FAILED", job.everything()
    assert [e.event for e in job.events()] == ["started", "failed"]
    assert "cannot be written" in job.events()[1].cause
    assert job.lab.job(job.job)["Restarts"] == "0"
