"""The preflight on a real Slurm: a fault of one node, which that node's own processes run into."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.support.slurm.faults import FAULTY_NODE, fault_environment
from tests.support.slurm.lab import NODES, wait_until
from tests.support.slurm.runs import Run

pytestmark = pytest.mark.slurm

MAX_S = 20.0
QUIET_S = 8.0  # of a preflight without a fault; where it takes longer, other processes keep the machine busy


class Preflights(NamedTuple):
    healthy: dict  # the report without a fault
    of: Callable[..., dict]  # (fault, node, *overrides) -> the report


@pytest.fixture(scope="module")
def preflight(lab, task, tmp_path_factory):
    """Runs the command on two trainer nodes and an engine node, with a fault on one of them."""
    layout = {"parallel": {"world_size": 2, "tensor": 2}, "weight_sync": {"transport": "broadcast"}}
    run = Run.write(
        lab,
        task,
        tmp_path_factory.mktemp("preflight"),
        slurm={"command": ["bash", str(FAULTY_NODE)], "gpus_per_node": 2},
        **layout,
    )
    command = ("--nodes=3", "--exclusive", "--gpus-per-node=2", "--output=/dev/null", "--wrap=sleep 600")
    run.job = lab.run("sbatch", "--parsable", *command)
    wait_until(lambda: run.state == "RUNNING", "three nodes", 30)

    def preflight(fault: str, node: str, *overrides: str, nodes: tuple[str, ...] = NODES[:3]) -> dict:
        environment = {**lab.environment, **run.environment, **fault_environment(run, task, fault, node)}
        environment |= {"SLURM_JOB_ID": run.job, "SLURM_JOB_NODELIST": ",".join(nodes)}
        command = [sys.executable, "-m", "dppo_megatron", "preflight", str(run.config), "--json"]
        command += [word for override in overrides for word in ("--set", override)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        assert result.stdout, result.stderr
        report = json.loads(result.stdout)
        assert result.returncode == (0 if report["ok"] else 1)
        assert not list(run.directory.glob(".preflight-*"))
        return report

    healthy = preflight("none", "")
    most_s = MAX_S * max(1.0, healthy["seconds"] / QUIET_S)

    def in_time(*arguments, **named) -> dict:
        report = preflight(*arguments, **named)
        assert report["seconds"] < most_s, report
        return report

    yield Preflights(healthy, in_time)
    lab.run("scancel", run.job)
    wait_until(lab.idle, "the job to end", 60)


def test_nothing_is_wrong(preflight):
    report = preflight.healthy
    assert report["ok"], report["findings"]
    assert {node: (facts["driver"], facts.get("GPU")) for node, facts in report["nodes"].items()} == {
        "node1": ("580.65.06", "NVIDIA H100"), "node2": ("580.65.06", "NVIDIA H100"), "node3": ("580.65.06", None),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "node", "text"),
    [
        ("hidden_run", "node2", "preflight.yaml: 1 problem   - no such file"),
        ("read_only", "node3", "cannot be written: Read-only file system"),
        ("other_model", "node3", "random_model: 0 files, on other nodes 5 files"),
        ("old_driver", "node2", "driver: 570.86.15, on other nodes 580.65.06"),
        ("used_memory", "node1", "GPU GPU-node1-0: another process uses 20480 MiB"),
        ("used_memory", "node3", "GPU GPU-node3-1: another process uses 20480 MiB"),
        ("no_network", "node1", "the store of rank 0 there is reached from no other node"),
        ("no_network", "node3", "serving-0: no answer while waiting for the store of rank 0"),
        ("killed", "node2", "a process there ended: Killed"),
        ("frozen", "node2", "rank-1: no answer while starting"),
        ("frozen_in_the_groups", "node2", "rank-1 did not arrive"),
    ],
)
def test_a_fault_of_one_node_is_found_and_the_node_named(preflight, fault, node, text):
    report = preflight.of(fault, node)
    assert report["bad_nodes"] == [node], report["findings"]
    assert any(text in finding["text"] for finding in report["findings"]), report["findings"]


def test_two_ranks_of_a_node_on_one_gpu(preflight):
    report = preflight.of("shared_gpu", "node1", "slurm.trainer_nodes=1", nodes=NODES[:2])
    (finding,) = [finding for finding in report["findings"] if finding["level"] == "error"]
    assert finding["text"].startswith("rank-0 and rank-1 share GPU GPU-node1-1")
    assert finding["nodes"] == ["node1"]
