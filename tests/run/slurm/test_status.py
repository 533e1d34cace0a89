"""Status and submission on run directories made by hand, with a squeue of the test."""

import contextlib
import io
import json
import os
import time
from dataclasses import asdict

import pytest
from rich.console import Console

from dppo_megatron.common.files import DamagedFile, write_json
from dppo_megatron.config import save_resolved
from dppo_megatron.report.logs import SERVER_READY, SERVER_START, SERVER_STOP, NewErrors, last_error
from dppo_megatron.rollout.fleet.registry import Service, free_port, register
from dppo_megatron.run.slurm import queue
from dppo_megatron.run.slurm.attempts import TIME_LIMIT, AttemptLog
from dppo_megatron.run.slurm.queue import SlurmError, SlurmRefused
from dppo_megatron.run.slurm.status import NotARun, read_status, show
from dppo_megatron.run.slurm.submit import StillQueued, refuse_second_job
from dppo_megatron.run_dir import RunDir
from tests.support.slurm.config import config


@pytest.fixture
def squeue(program):
    """Called with the output of squeue and its exit code."""
    return lambda text, code=0: program("squeue", f"printf '%s\\n' '{text}'\nexit {code}")


@pytest.fixture
def run(tmp_path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)
    save_resolved(config(), run.config)
    return run


def test_a_run_in_its_second_life(run, squeue):
    squeue("7|sums | of | pipes|PENDING|Resources||1:00:00")
    attempts = AttemptLog(run)
    attempts.record("started", "submitted", job="7", restart=0)
    attempts.record("requeued", TIME_LIMIT, job="7", restart=0)
    attempts.record("started", TIME_LIMIT, job="7", restart=1)
    run.checkpoints.mkdir()
    (run.checkpoints / "latest").write_text("step-000002")
    write_json(run.published, {"version": 3, "path": "x", "published_at": 0.0})
    now = time.time()
    records = [
        {"step": 0, "time": now - 30, "eval/accuracy": 0.25},
        {"step": 3, "time": now - 20, "time/step_s": 2.0, "rollout/reward_mean": 0.5},
    ]
    run.metrics.write_text("".join(json.dumps(r) + "\n" for r in records))
    register(run, "engine-0", f"http://127.0.0.1:{free_port()}", 1)
    run.log("trainer-0").write_text("INFO fine\nx ERROR y: first\nx ERROR y: rank 1 is gone\nINFO later\n")
    run.log("orchestrator").write_text("INFO fine: 0 errors\n")
    status = read_status(run.root)
    assert (status.step, status.checkpoint, status.policy_version, status.restarts) == (3, 2, 3, 1)
    assert (status.state, "the launcher on a node was killed" in status.state_text) == ("queued", True)
    assert (status.metrics["rollout/reward_mean"], status.heldout) == (0.5, {"eval/accuracy": 0.25})
    assert 19 < status.updated_s < 60
    assert [(j.id, j.state, j.reason, j.name) for j in status.jobs] == [
        ("7", "PENDING", "Resources", "sums | of | pipes")
    ]
    assert status.last_event == "started (time limit)"
    assert [(e.log, e.line) for e in status.errors] == [("trainer-0.log", "x ERROR y: rank 1 is gone")]
    (engine,) = status.engines
    assert engine.health.startswith("does not answer")
    json.dumps(asdict(status))
    console = Console(width=120, record=True, file=io.StringIO())
    show(status, console)
    shown = console.export_text()
    for text in ("3 of 1", "0.500", "25.0%", "PENDING", "rank 1 is gone", "does not answer", "step 2"):
        assert text in shown


def test_an_engine_that_listens_on_another_nodes_loopback_is_not_asked(run, squeue):
    """A process that answers at that address here is not the engine."""
    squeue("")
    write_json(run.services / "engine-0.json", asdict(Service("engine-0", "http://127.0.0.1:1", 7, "another-node")))
    (engine,) = read_status(run.root).engines
    assert engine.health == "reachable only from its own node"


@pytest.mark.parametrize(
    ("answer", "code", "note"),
    [
        ("", 0, "job 7 is not in the queue"),
        ("slurm_load_jobs error: Invalid job id specified", 1, "job 7 is not in the queue"),
        ("Unable to contact slurm controller", 1, "Unable to contact slurm controller"),
    ],
)
def test_a_note_explains_an_empty_or_failed_answer_of_the_queue(run, squeue, answer, code, note):
    squeue(answer, code)
    AttemptLog(run).record("started", "submitted", job="7", restart=0)
    status = read_status(run.root)
    assert status.jobs == []
    assert note in status.queue_note


def test_a_run_that_slurm_never_saw_and_a_directory_without_a_run(run, tmp_path):
    assert read_status(run.root).queue_note == ""
    with pytest.raises(NotARun, match=r"no run with a config.yaml"):
        read_status(tmp_path)
    with run.take(), pytest.raises(NotARun, match=rf"did you mean {run.root}\?"):
        read_status(run.root.parent)


def test_a_server_that_was_asked_to_end_makes_no_errors():
    lines = ["x ERROR y: one", f"SIGTERM {SERVER_STOP}", "ERROR vllm.EngineDeadError: EngineCore", "INFO bye"]
    assert last_error(lines) == "x ERROR y: one"
    assert last_error([*lines, f"{SERVER_START} 0: vllm serve", "ERROR y: two"]) == "ERROR y: two"
    assert last_error(lines[1:]) is None


def test_errors_before_a_server_answered_are_no_errors():
    start = [
        f"{SERVER_START} 0: sglang",
        "requests.exceptions.ConnectionError: Max retries exceeded with url: /freeze_gc",
    ]
    assert last_error(start) == start[1]
    assert last_error([*start, f"engine-0 {SERVER_READY} http://a after 9.0 s"]) is None
    crash = ["RuntimeError: out of memory", *start, f"engine-0 {SERVER_READY} http://a after 9.0 s"]
    assert last_error(crash) == crash[0]
    assert last_error([*crash, "x ERROR y: later"]) == "x ERROR y: later"


def test_the_error_is_of_the_rank_that_failed_first_in_the_latest_attempt(run):
    ranks = [run.log(f"trainer-{rank}") for rank in range(3)]
    for log in ranks:
        log.write_text("ValueError: of an earlier attempt\n")
    errors = NewErrors(run.logs)
    assert errors.first_of("trainer") is None
    for rank, line in ((1, "WeightSyncError: engine-0 is deaf"), (0, "RuntimeError: connection closed by peer")):
        with ranks[rank].open("a") as file:
            file.write(f"Traceback\n{line}\nlater\n")
        os.utime(ranks[rank], (time.time() + 5 - rank,) * 2)
    assert errors.first_of("trainer") == "trainer-1: WeightSyncError: engine-0 is deaf"
    assert errors.first_of("orchestrator") is None


@pytest.mark.parametrize(
    ("message", "failures", "error"),
    [
        ("Unable to contact slurm controller (connect failure)", 3, None),
        ("Unable to contact slurm controller (connect failure)", 99, SlurmError),
        ("Requested operation is presently disabled for job 7", 1, SlurmRefused),
    ],
)
def test_a_requeue_is_repeated_until_slurm_answers(tmp_path, program, monkeypatch, message, failures, error):
    """`failures`: how often scontrol fails with it before it succeeds; more than a few would take too long."""
    count = tmp_path / "count"
    fails = f"[ $(wc -l < {count}) -gt {failures} ] || {{ echo '{message}' >&2; exit 1; }}"
    program("scontrol", f"echo >> {count}\n{fails}")
    monkeypatch.setattr(queue, "FIRST_PAUSE_S", 0.01)
    expected = contextlib.nullcontext() if error is None else pytest.raises(error, match=message.split("(")[0])
    with expected:
        queue.retry_until_answered(lambda: queue.requeue("7"), 60 if error is None else 1)
    tries = len(count.read_text().splitlines())
    assert tries == 4 if error is None else (tries == 1) == (error is SlurmRefused)


@pytest.mark.parametrize("state", ["RUNNING", "PENDING"])
def test_a_second_job_of_a_run_is_refused(run, squeue, state):
    squeue(f"7|sums|{state}|None|node1|1:00:00")
    AttemptLog(run).record("submitted", "", job="7", restart=0)
    with pytest.raises(StillQueued, match=f"job 7 of this run is {state}; `scancel 7` ends it"):
        refuse_second_job(run)
    refuse_second_job(run, job_id="7")
    squeue("7|sums|COMPLETING|None|node1|1:00:00")
    refuse_second_job(run)


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("services/engine-0.json", "[]", r"the whole is \[\]"),
        ("services/engine-0.json", '{"name": "e", "url": "http://a:80a", "pid": 1, "host": ""}', "must be http://HOST"),
        ("services/engine-0.json", '{"name": "engine-0", "url": 7, "pid": 1, "host": ""}', r"url is 7: .*string"),
        ("weights/published.json", '{"version": "3", "path": null}', r"version is '3': .*integer"),
        ("weights/published.json", "\x00", "not|JSON"),
    ],
)
def test_a_damaged_file_is_named_with_its_fault(run, squeue, file, content, why):
    squeue("")
    (run.root / file).parent.mkdir(exist_ok=True)
    (run.root / file).write_text(content)
    with pytest.raises(DamagedFile, match=rf"{file}: .*{why}.*; restore it, or remove it"):
        read_status(run.root)


def test_a_line_that_is_no_event_of_an_attempt_is_skipped(run, squeue):
    squeue("")
    AttemptLog(run).record("started", "submitted", job="7", restart=0)
    sound = run.restarts.read_text()
    run.restarts.write_text(sound.replace('"7"', '"7 --help"') + sound.replace("time", "tim") + "[]\n" + sound)
    assert len(AttemptLog(run).events()) == 1


@pytest.mark.parametrize(("before", "after"), [("(null)", "n3,n4"), ("n[1-2]", "n3,n4,n[1-2]")])
def test_nodes_are_excluded_in_addition_to_those_before(before, after, tmp_path, program):
    program("scontrol", f'echo "$@" >> {tmp_path}/asked\necho "JobId=7 ExcNodeList={before} Requeue=1"')
    queue.exclude("7+1", ["n3", "n4"])
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["show job --oneliner 7+1", f"update JobId=7+1 ExcNodeList={after}"]
