"""Runs by sbatch on a real Slurm: real vLLM, real trainer ranks, ended in every way a job can end."""

import json
import re
import time

import pytest

from dppo_megatron.bank import BankReader
from dppo_megatron.run.slurm.script import batch_script
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights.published import PublishedPolicy
from tests.support.runs import records, steps_done, weights_digest
from tests.support.slurm.config import config
from tests.support.slurm.lab import NODES, wait_until
from tests.support.slurm.rewards import GROUPS
from tests.support.slurm.runs import STEPS, Run

pytestmark = pytest.mark.slurm

THREE_NODES = ("--nodes=3", "--gpus-per-node=1")


@pytest.fixture(scope="module")
def uninterrupted(lab, task, tmp_path_factory) -> Run:
    """The run that every other run must equal."""
    run = Run.write(lab, task, tmp_path_factory.mktemp("uninterrupted"), slurm={"preflight": True})
    run.gate.touch()
    run.sbatch("train.sbatch", *THREE_NODES)
    assert run.wait_for_end() == "COMPLETED", run.everything()
    return run


@pytest.fixture
def run(lab, task, tmp_path, request) -> Run:
    """A run that its reward stops after the second step, until `run.gate` exists."""
    run = Run.write(lab, task, tmp_path, **getattr(request, "param", {}))
    yield run
    if run.job:
        lab.run("scancel", run.job, check=False)
        wait_until(lab.idle, "the job to end", 60)


def check_complete(run: Run, reference: Run) -> None:
    """Every step trained once, every prompt sampled once, and the weights those of an undisturbed run."""
    assert steps_done(run.directory) == list(range(1, STEPS + 1))
    assert [e.position for e in rollouts(run)] == list(range(STEPS * GROUPS))
    assert weights_digest(run.directory) == weights_digest(reference.directory)


def rollouts(run: Run) -> list:
    reader = BankReader(run.directory / "bank")
    return sorted(reader.entries(0, reader.refresh()), key=lambda entry: entry.position)


def contents(entries: list) -> list:
    return [(e.position, e.segment, e.offset, e.front, e.part_crc.tolist()) for e in entries]


@pytest.mark.smoke
def test_two_trainer_nodes_and_an_engine_node(uninterrupted):
    run = uninterrupted
    check_complete(run, run)
    assert [event.event for event in run.events()] == ["started", "completed"]
    assert run.events()[0].nodes == NODES[:3]
    heads = {log.stem: log.read_text() for log in (run.directory / "logs").glob("*.log")}
    assert set(heads) == {"engine-0", "orchestrator", "preflight", "trainer-0", "trainer-1"}
    assert "preflight: 3 nodes, 0 errors" in run.output.read_text()
    assert "completed 4 steps" in run.output.read_text()


def test_a_heterogeneous_job_in_which_an_engine_dies_and_starts_again(run, uninterrupted):
    run.sbatch("train_hetjob.sbatch", "--nodes=2", "--gpus-per-node=1", ":", "--nodes=1", "--gpus-per-node=1")
    run.wait_for_step(2)
    (server,) = [
        p for p in run.lab.processes_on("node3") if "vllm.entrypoints.launchers.api_server.entry" in p.cmdline()
    ]
    server.kill()
    run.wait_until(lambda: "engine-0 serves again" in run.output.read_text(), "the engine's second start")
    run.gate.touch()
    assert run.wait_for_end() == "COMPLETED", run.everything()
    check_complete(run, uninterrupted)
    assert run.lab.job(run.job)["Restarts"] == "0"


SPANNING = {
    "parallel": {"world_size": 1, "tensor": 1},
    "engine": {"tensor_parallel": 2, "nodes": 2},
    "slurm": {"trainer_nodes": 1, "engine_nodes": 2, "gpus_per_node": 2},
    "objective": {"settings": {"delta": 0.2, "distillation": "reverse_kl", "distillation_coefficient": 1.0}},
    "distillation": {"topk": 4, "teachers": {"start": {}}},
}


@pytest.mark.parametrize("run", [SPANNING], indirect=True)
def test_an_engine_on_two_nodes_of_which_one_dies_starts_again_on_both(run):
    """The job also starts a teacher, on the second GPU of the engine's first node."""
    run.sbatch("train.sbatch", "--nodes=3", "--gpus-per-node=2")
    run.wait_for_step(2)
    head, other = (
        next(process for process in run.lab.processes_on(node) if ["--node-rank", rank] == argument_of(process))
        for node, rank in (("node2", "0"), ("node3", "1"))
    )
    other.kill()
    run.wait_until(lambda: "engine-0 serves again" in run.output.read_text(), "the engine's second start")
    assert not head.is_running()
    run.gate.touch()
    assert run.wait_for_end() == "COMPLETED", run.everything()
    assert steps_done(run.directory) == list(range(1, STEPS + 1))
    assert [e.position for e in rollouts(run)] == list(range(STEPS * GROUPS))
    logs = {log.stem for log in (run.directory / "logs").glob("*.log")}
    assert logs == {"engine-0", "engine-0.1", "orchestrator", "trainer-0"}
    teacher = run.directory / "teachers" / "start"
    command = (teacher / "logs" / "engine-0.log").read_text()
    assert "--max-logprobs 4" in command, command[:2000]
    taught = [r["teacher/start/kl"] for r in records(run.directory) if "teacher/start/kl" in r]
    assert len(taught) == STEPS
    assert abs(taught[0]) < 1e-5 < taught[-1]  # the policy starts at its teacher


def argument_of(process) -> list[str]:
    """The option --node-rank and its value."""
    command = process.cmdline()
    return command[(at := command.index("--node-rank")) : at + 2] if "--node-rank" in command else []


@pytest.mark.parametrize("run", [{"checkpoint": {"every": 0}}], indirect=True)
def test_the_time_limit_then_a_dead_node_requeue_and_lose_nothing(run, uninterrupted):
    """checkpoint.every = 0: the one at step 2 is the signal's. The worst node dies in the second attempt: the batch
    script, the orchestrator and trainer rank 0 are on it."""
    run.sbatch("train.sbatch", *THREE_NODES, "--signal=B:USR1@120")
    run.wait_for_step(2)
    hours, minutes, seconds = map(int, run.lab.job(run.job)["RunTime"].split(":"))
    # Slurm looks every half minute whether the signal is due, also for the next half minute.
    limit(run, minutes=60 * hours + minutes + (seconds + 120 + 30) // 60)
    run.wait_until(lambda: run.lab.job(run.job)["Restarts"] == "1", "a requeue")
    limit(run, minutes=30)
    requeued, published = time.time(), RunDir(run.directory).published
    before = contents(rollouts(run))
    assert len(before) == 2 * GROUPS
    run.wait_until(
        lambda: (new := PublishedPolicy.read(published)) and new.published_at > requeued, "the second attempt"
    )
    run.lab.kill_node("node1")
    try:
        run.wait_until(lambda: len(run.events()) > 3, "the third attempt")
        run.gate.touch()
        assert run.wait_for_end() == "COMPLETED", run.everything()
    finally:
        run.lab.start_node("node1")
    shown = [(e.event, e.cause, e.step) for e in run.events()]
    assert shown[:3] == [("started", "submitted", None), ("requeued", "time limit", 2), ("started", "time limit", 2)]
    third = run.events()[3]
    assert (third.event, third.restart, third.nodes) == ("started", 2, NODES[1:])
    assert "node failed" in third.cause
    assert contents(rollouts(run))[: len(before)] == before
    check_complete(run, uninterrupted)


def limit(run: Run, minutes: int) -> None:
    run.lab.run("scontrol", "update", f"JobId={run.job}", f"TimeLimit={minutes}")


def test_scancel_leaves_no_process_and_a_resumable_run(run, uninterrupted):
    """Submitted by `dppo-megatron slurm`, followed by `dppo-megatron status`, continued by sbatch."""
    shown = run.command("slurm", run.config)
    run.job = (run.directory / "restarts.jsonl").read_text().split('"job": "')[1].split('"')[0]
    assert f"submitted job {run.job}" in shown
    run.wait_for_step(2)
    status = json.loads(run.command("status", run.directory, "--json"))
    assert (status["step"], status["steps"], status["checkpoint"], status["policy_version"]) == (2, STEPS, 2, 2)
    assert [engine["health"] for engine in status["engines"]] == ["answers"]
    assert [job["state"] for job in status["jobs"]] == ["RUNNING"]
    run.lab.run("scancel", run.job)
    assert run.wait_for_end() == "CANCELLED", run.everything()
    wait_until(lambda: not run.lab.processes_on(), "the job's processes to end", 30)
    assert [e.event for e in run.events()] == ["submitted", "started", "stopped"]
    run.gate.touch()
    run.sbatch("train.sbatch", *THREE_NODES, arguments=("--resume",))
    assert run.wait_for_end() == "COMPLETED", run.everything()
    check_complete(run, uninterrupted)


@pytest.mark.parametrize("run", [{"model": {"path": "/no/such/model"}}], indirect=True)
def test_a_config_error_ends_the_job_with_the_reason_in_its_output(run):
    run.sbatch("train.sbatch", *THREE_NODES)
    assert run.wait_for_end() == "FAILED"
    job = run.lab.job(run.job)
    assert (job["ExitCode"], job["Restarts"]) == ("2:0", "0")
    assert "/no/such/model" in run.output.read_text()
    assert run.events()[-1].event == "failed"


def test_sbatch_reads_the_settings_and_directories_of_a_written_script_unchanged(lab, tmp_path):
    directory, script = tmp_path / "w d#\"'$(touch owned)50%j\\", tmp_path / "script"
    comment, name = "a # b $(touch owned) 50%j ü", "r # `touch owned`"
    options = ["--hold", f"--comment={comment}", "--nice=7"]
    settings = {"account": "lab.a-1", "partition": "main", "time": "1-02:03:00", "gpus_per_node": "gpu:h100:2(S:0)"}
    tree = config(sections={"run": {"dir": tmp_path / name}}, sbatch_args=options, **settings)
    script.write_text(batch_script(tree, resume=False, directory=directory))
    job = lab.run("sbatch", "--parsable", str(script))
    try:
        shown = lab.run("scontrol", "show", "job", job)
    finally:
        lab.run("scancel", job)
    first, *lines = [line.strip() for line in shown.splitlines()]
    assert first == f"JobId={job} JobName={name}"
    assert f"WorkDir={directory}" in lines
    assert f"StdOut={tmp_path}/{name}/logs/slurm-{job}.out" in lines
    assert f"Comment={comment}" in lines
    fields = {"Account=lab.a-1", "Partition=main", "TimeLimit=1-02:03:00", "Nice=7", "NumNodes=3-3"}
    assert {*fields, "TresPerNode=gres:gpu:h100:2"} <= {*shown.split()}


def test_a_model_is_converted_and_evaluated_by_sbatch(run, task):
    model, checkpoint, back = task / "random_model", run.directory.parent / "megatron", run.directory.parent / "hf"
    for direction, source, made in (("hf-to-megatron", model, checkpoint), ("megatron-to-hf", checkpoint, back)):
        run.submit("convert.sbatch", arguments=(direction, str(source), str(made)))
        assert run.wait_for_end() == "COMPLETED", run.everything()
    assert (back / "model.safetensors").stat().st_size > 0
    run.sbatch("eval.sbatch", "--gpus-per-node=1", arguments=("--model", str(back), "--set", "engine.count=1"))
    assert run.wait_for_end() == "COMPLETED", run.everything()
    assert re.search(rf"{back}: \d+ of \d+ right", run.output.read_text())
