"""The preflight on a real Slurm: a fault of one node, which the node's own processes run into, and jobs that go on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm.test_driver import SERVES, STUB
from tests.support.slurm.lab import NODES, wait_until
from tests.support.slurm.runs import ROOT, Run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

FAULTY_NODE = ROOT / "tests" / "support" / "slurm" / "faulty_node.sh"
MOST_S = 20.0


@pytest.fixture(scope="module")
def nodes(lab, task, tmp_path_factory):
    """Runs `dppo-megatron preflight` in an allocation of the four nodes, with a fault on one: its report."""
    layout = {"parallel": {"world_size": 3, "tensor": 1}, "weight_sync": {"transport": "broadcast"}}
    slurm = {"trainer_nodes": 3, "engine_nodes": 1, "command": ["bash", str(FAULTY_NODE)]}
    run = Run.write(lab, task, tmp_path_factory.mktemp("preflight"), slurm=slurm, **layout)
    sleeping = ("--nodes=4", "--gpus-per-node=1", "--output=/dev/null", "--wrap=sleep 600")
    run.job = lab.run("sbatch", "--parsable", *sleeping)
    wait_until(lambda: run.state == "RUNNING", "four nodes", 30)
    job = {"SLURM_JOB_ID": run.job, "SLURM_JOB_NODELIST": ",".join(NODES)}

    def preflight(fault: str, node: str) -> dict:
        environment = lab.environment | run.environment | job | faults(run, task, fault, node)
        command = [sys.executable, "-m", "dppo_megatron", "preflight", str(run.config), "--json"]
        began = time.monotonic()
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert result.stdout, result.stderr
        report = json.loads(result.stdout)
        assert result.returncode == (0 if report["ok"] else 1)
        assert time.monotonic() - began < MOST_S
        return report

    yield preflight
    lab.run("scancel", run.job)
    wait_until(lab.idle, "the job to end", 60)


def faults(run: Run, task: Path, fault: str, nodes: str) -> dict[str, str]:
    return {
        "FAULT": fault,
        "FAULT_NODES": nodes,
        "PYTHON": sys.executable,
        "RUN": str(run.directory),
        "MODEL": str(task / "random_model"),
        "GPUS": str(ROOT / "tests" / "support" / "slurm" / "gpus"),
    }


def test_nothing_is_wrong(nodes):
    report = nodes("none", "")
    assert report["ok"], report["findings"]
    assert list(report["nodes"]) == list(NODES)


@pytest.mark.parametrize(
    ("fault", "node", "text"),
    [
        ("hidden_run", "node2", "preflight.yaml: 1 problem   - no such file"),
        ("read_only", "node4", "cannot be written: Read-only file system"),
        ("other_model", "node3", "random_model: 0 files, on other nodes 5 files"),
        ("no_network", "node1", "the store of rank 0 there is reached from no other node"),
        ("no_network", "node4", "serving-0: no answer from the store of rank 0"),
        ("killed", "node2", "a process there ended: Killed"),
        ("frozen", "node3", "rank-2: did not start"),
        ("frozen_in_a_group", "node2", "rank-1 did not arrive"),
    ],
)
def test_a_fault_of_one_node_is_found_and_the_node_named(nodes, fault, node, text):
    report = nodes(fault, node)
    assert report["bad_nodes"] == [node], report["findings"]
    assert any(text in finding["text"] for finding in report["findings"]), report["findings"]


@pytest.fixture
def job(lab, task, tmp_path):
    """A run whose preflight is real, with a fault on some nodes, and whose other steps are stubs."""
    stub, command = tmp_path / "stub.py", tmp_path / "command.sh"
    stub.write_text(STUB + SERVES)
    command.write_text(f'[ "$2" = preflight ] && exec bash {FAULTY_NODE} "$@"\nexec {sys.executable} {stub} "$@"\n')
    slurm = {"trainer_nodes": 1, "engine_nodes": 1, "command": ["bash", str(command)], "preflight": True}
    run = Run.write(lab, task, tmp_path, slurm=slurm, parallel={"world_size": 1, "tensor": 1})
    yield run
    lab.run("scancel", run.job, check=False)
    wait_until(lab.idle, "the job to end", 60)


def submit(job: Run, task: Path, monkeypatch, fault: str, nodes: str) -> None:
    for name, value in faults(job, task, fault, nodes).items():
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


def test_what_no_other_node_would_cure_fails_the_job(job, task, monkeypatch):
    submit(job, task, monkeypatch, "read_only", " ".join(NODES))
    assert job.wait_for_end() == "FAILED", job.everything()
    assert [e.event for e in job.events()] == ["started", "failed"]
    assert "cannot be written" in job.events()[1].cause
    assert job.lab.job(job.job)["Restarts"] == "0"
