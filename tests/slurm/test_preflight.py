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

SUPPORT = ROOT / "tests" / "support" / "slurm"
FAULTY_NODE = SUPPORT / "faulty_node.sh"
MOST_S = 20.0


def fault_environment(run: Run, task: Path, fault: str, nodes: str) -> dict[str, str]:
    """What faulty_node.sh reads: the fault, and on which nodes it is."""
    paths = {"RUN": run.directory, "MODEL": task / "random_model", "GPUS": SUPPORT / "gpus", "PYTHON": sys.executable}
    return {"FAULT": fault, "FAULT_NODES": nodes} | {name: str(path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def preflight(lab, task, tmp_path_factory):
    """Runs the command on two trainer nodes and an engine node, with a fault on one of them: its report."""
    layout = {"parallel": {"world_size": 2, "tensor": 2}, "weight_sync": {"transport": "broadcast"}}
    run = Run.write(
        lab, task, tmp_path_factory.mktemp("preflight"), slurm={"command": ["bash", str(FAULTY_NODE)]}, **layout
    )
    command = ("--nodes=3", "--gpus-per-node=2", "--output=/dev/null", "--wrap=sleep 600")
    run.job = lab.run("sbatch", "--parsable", *command)
    wait_until(lambda: run.state == "RUNNING", "three nodes", 30)

    def preflight(fault: str, node: str, *overrides: str, nodes: tuple[str, ...] = NODES[:3]) -> dict:
        environment = {**lab.environment, **run.environment, **fault_environment(run, task, fault, node)}
        environment |= {"SLURM_JOB_ID": run.job, "SLURM_JOB_NODELIST": ",".join(nodes)}
        command = [sys.executable, "-m", "dppo_megatron", "preflight", str(run.config), "--json"]
        command += [word for override in overrides for word in ("--set", override)]
        began = time.monotonic()
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert result.stdout, result.stderr
        report = json.loads(result.stdout)
        assert result.returncode == (0 if report["ok"] else 1)
        assert time.monotonic() - began < MOST_S
        assert not list(run.directory.glob(".preflight-*"))
        return report

    yield preflight
    lab.run("scancel", run.job)
    wait_until(lab.idle, "the job to end", 60)


def test_nothing_is_wrong(preflight):
    report = preflight("none", "")
    assert report["ok"], report["findings"]
    assert {node: (facts["driver"], facts["GPU"]) for node, facts in report["nodes"].items()} == {
        "node1": ("580.65.06", "NVIDIA H100"), "node2": ("580.65.06", "NVIDIA H100"), "node3": ("580.65.06", "-"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "node", "text"),
    [
        ("hidden_run", "node2", "preflight.yaml: 1 problem   - no such file"),
        ("read_only", "node3", "cannot be written: Read-only file system"),
        ("other_model", "node3", "random_model: 0 files, on other nodes 5 files"),
        ("old_driver", "node2", "driver: 570.86.15, on other nodes 580.65.06"),
        ("used_memory", "node1", "GPU GPU-node1-0: another process holds 20480 MiB"),
        ("unknown_error", "node3", "Unable to determine the device handle"),
        ("lost_gpu", "node2", "GPU 0 is missing: nvidia-smi lists 1"),
        ("no_answer", "node3", "timed out after 7.0 seconds"),
        ("no_network", "node1", "the store of rank 0 there is reached from no other node"),
        ("no_network", "node3", "serving-0: no answer from the store of rank 0"),
        ("killed", "node2", "a process there ended: Killed"),
        ("frozen", "node2", "rank-1: did not start"),
        ("frozen_in_the_groups", "node2", "rank-1 did not arrive"),
    ],
)
def test_a_fault_of_one_node_is_found_and_the_node_named(preflight, fault, node, text):
    report = preflight(fault, node)
    assert report["bad_nodes"] == [node], report["findings"]
    assert any(text in finding["text"] for finding in report["findings"]), report["findings"]


def test_two_ranks_of_a_node_on_one_gpu(preflight):
    report = preflight("shared_gpu", "node1", "slurm.trainer_nodes=1", "slurm.gpus_per_node=2", nodes=NODES[:2])
    (finding,) = [finding for finding in report["findings"] if finding["level"] == "error"]
    assert finding["text"].startswith("rank-0 and rank-1 share GPU GPU-node1-1")
    assert finding["nodes"] == ["node1"]


@pytest.fixture
def job(lab, task, tmp_path):
    """A run whose preflight is real, with a fault on some nodes, and whose other steps are stubs."""
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


def test_what_no_other_node_would_cure_fails_the_job(job, task, monkeypatch):
    submit(job, task, monkeypatch, "read_only", " ".join(NODES))
    assert job.wait_for_end() == "FAILED", job.everything()
    assert [e.event for e in job.events()] == ["started", "failed"]
    assert "cannot be written" in job.events()[1].cause
    assert job.lab.job(job.job)["Restarts"] == "0"
