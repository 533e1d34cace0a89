"""Jobs on a real Slurm with stubs as steps: driver and scripts when steps end in various ways."""

import json
import sys
from pathlib import Path

import pytest

from dppo_megatron.run.slurm.attempts import AttemptLog
from dppo_megatron.run_dir import RunDir
from tests.support.slurm.lab import wait_until
from tests.support.slurm.runs import TIMEOUT_S, Run

pytestmark = pytest.mark.slurm

# argv: slurm-task ROLE [options] CONFIG. Writes its environment to a file, then acts as the test asks.
STUB = """
import json, os, pathlib, signal, sys, time
role, rank = sys.argv[2], int(os.environ["SLURM_PROCID"])
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda *_: sys.exit(0))
seen = {"argv": sys.argv[2:], "node": os.environ["SLURMD_NODENAME"], "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
job = os.environ["SLURM_JOB_ID"]
if "SLURM_ARRAY_JOB_ID" in os.environ:
    job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
seen_file = pathlib.Path(__file__).with_name(f"{job}-{role}-{rank}.json")
seen_file.with_suffix(".tmp").write_text(json.dumps(seen))
seen_file.with_suffix(".tmp").rename(seen_file)
def train():
    latest = pathlib.Path(sys.argv[-1]).parent / "checkpoints" / "latest"
    latest.parent.mkdir(exist_ok=True)
    latest.write_text("step-000004")
"""
ENDLESS = "time.sleep(600)\n"
SERVES = "train() if role == 'trainer' else time.sleep(600 if role == 'engine' else 0)\n"
CRASHES = """
if role == "trainer" and rank == 1:
    time.sleep(1)
    sys.exit("rank ran into a wall")
time.sleep(0 if role == "check" else 600)
"""


@pytest.fixture
def stubbed(lab, task, tmp_path):
    """Make a run with steps of the given `behaviour`."""
    runs = []

    def make(behaviour: str, **slurm) -> Run:
        stub = tmp_path / "stub.py"
        stub.write_text(STUB + behaviour)
        runs.append(Run.write(lab, task, tmp_path, slurm={"command": [sys.executable, str(stub)], **slurm}))
        return runs[-1]

    yield make
    for run in runs:
        lab.run("scancel", run.job, check=False)
    wait_until(lab.idle, "the jobs to end", 60)


def seen(directory: Path, name: str) -> dict:
    (path,) = directory.glob(f"{name}.json")
    return json.loads(path.read_text())


def test_a_crash_loop_of_a_heterogeneous_job_stops_with_the_reason(stubbed):
    run = stubbed(CRASHES, heterogeneous=True, max_restarts=1)
    run.sbatch("train_hetjob.sbatch", "--nodes=2", "--gpus-per-node=1", ":", "--nodes=1", "--gpus-per-node=1")
    assert run.wait_for_end() == "FAILED"
    job = run.lab.job(run.job)
    assert (job["ExitCode"], job["Restarts"]) == ("1:0", "1")
    output = run.output.read_text()
    assert "rank ran into a wall" in output
    assert "trainer ended: exit code 1; 2 attempts in a row saved no new checkpoint, slurm.max_restarts = 1" in output
    assert [(e.event, e.restart) for e in run.events()] == [
        ("started", 0), ("requeued", 0), ("started", 1), ("failed", 1),
    ]  # fmt: skip
    assert run.events()[2].cause == "trainer ended: exit code 1"


def test_a_request_to_stop_ends_the_job_without_a_requeue(stubbed, tmp_path):
    run = stubbed("if role == 'check': sys.exit(0)\n" + ENDLESS)
    run.sbatch("train.sbatch", "--nodes=3", "--gpus-per-node=1")
    run.wait_until(lambda: list(tmp_path.glob("*-trainer-1.json")), "the trainer")
    run.lab.run("scancel", "--signal=USR2", "--batch", run.job)
    assert run.wait_for_end() == "FAILED"  # 128 + USR2: the run is not complete
    assert [(e.event, e.cause) for e in run.events()][1:] == [("stopped", "asked to by SIGUSR2")]
    assert not run.lab.processes_on()


def test_a_job_array_sweeps_methods_and_seeds(stubbed, tmp_path):
    """Each run has one node, where the engine takes the GPU after the rank's."""
    run = stubbed(SERVES)
    layout = ["parallel.world_size=1", "parallel.tensor=1", "slurm.trainer_nodes=1", "slurm.engine_nodes=0"]
    arguments = [word for item in (*layout, "slurm.gpus_per_node=2") for word in ("--set", item)]
    options = ("--array=1,3", "--gpus-per-node=2", f"--export=ALL,RUNS={tmp_path / 'runs'}")
    run.sbatch("sweep.sbatch", *options, arguments=tuple(arguments))
    names = ["dppo_binary_tv-2", "drpo-1"]
    attempts = [AttemptLog(RunDir(tmp_path / "runs" / name)) for name in names]

    def complete(attempts: AttemptLog) -> bool:
        return [event.event for event in attempts.events()] == ["started", "completed"]

    wait_until(lambda: all(map(complete, attempts)), "two runs", TIMEOUT_S, run.everything)
    job = attempts[0].events()[0].job
    assert job.endswith("_1")
    engine, trainer, orchestrator = (seen(tmp_path, f"{job}-{n}-0") for n in ("engine", "trainer", "orchestrator"))
    assert engine["argv"][:5] == ["engine", "--index", "0", "--first-gpu", "1"]
    assert (engine["gpus"], trainer["gpus"], orchestrator["gpus"]) == ("0,1", "0,1", None)
