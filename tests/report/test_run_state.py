"""The state of a run, read from its directory: every way to start, wait, end and hang."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from dppo_megatron.common import heartbeat
from dppo_megatron.common.file_lock import FileLock, LockHeld
from dppo_megatron.common.files import write_json
from dppo_megatron.report.doctor import diagnose, text
from dppo_megatron.report.run_state import LATE_S, HeartbeatReader, hang, heartbeats, record_attempt, run_state
from dppo_megatron.run_dir import RunDir

DEATHS = "was killed, its machine failed, or its disk is full"


@pytest.fixture
def run(tmp_path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)
    return run


def step(run: RunDir, number: int, at: float) -> None:
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": number, "time": at, "train/loss": 0.5, "time/step_s": 1.0}) + "\n")


def beat(run: RunDir, rank: int, **values) -> None:
    now = time.time()
    about = {"host": f"node{rank}", "pid": 100 + rank, "phase": "forward_backward", "step": 7, "moves": 3}
    write_json(
        run.heartbeats / f"trainer-{rank}",
        about
        | {"since": now, "time": now, "call": "all_reduce (train/actor/layout.py, line 41)", "waits": True}
        | values,
    )


def test_a_run_from_its_start_to_its_end(run):
    step(run, 2, time.time() - 600)  # of an earlier attempt
    with run.take():
        record_attempt(run, "started", "")
        run.log("engine-0").touch()
        assert str(run_state(run)) == f"starting: engine-0 loads the model; see {run.log('engine-0')}"
        write_json(run.services / "engine-0.json", {})
        assert run_state(run).reason.startswith("the trainer loads the model")
        step(run, 3, time.time() + 1)
        beat(run, 0)
        assert str(run_state(run)) == "running at step 3: forward_backward of step 7"
        beat(run, 0, phase="wait", since=time.time() - 62)
        assert str(run_state(run)).startswith("waiting: rollouts of step 7, for 0:01:0")
    state = run_state(run)  # the launcher, and with it every process, was killed
    assert str(state) == f"died at step 3: the launcher on {socket.gethostname()} {DEATHS}"
    for event, cause, kind in (
        ("failed", "trainer-0 ended: killed by SIGKILL", "died at step 3: trainer-0 ended: killed by SIGKILL"),
        ("stopped", "SIGINT", "paused at step 3: SIGINT"),
        ("completed", "", "finished at step 3"),
        ("requeued", "node7 failed", "queued: node7 failed"),
    ):
        record_attempt(run, event, cause)
        assert str(run_state(run)) == kind
        assert ("run died" in diagnose(run.root).findings) == (event == "failed")
        assert kind in text(diagnose(run.root)) or event == "failed"


def test_the_doctor_reads_the_metrics_once(run, monkeypatch):
    step(run, 3, time.time())
    record_attempt(run, "stopped", "SIGINT")
    monkeypatch.setattr("dppo_megatron.report.run_state.read_metrics", None)
    assert "state: paused at step 3: SIGINT" in text(diagnose(run.root))


def test_a_run_on_another_host_lives_as_long_as_its_heartbeats(run):
    """A cluster's file system may have locks that other nodes do not see."""
    step(run, 1, time.time())
    run.restarts.write_text(json.dumps({"time": 0.0, "event": "started", "job": "7"}) + "\n")
    beat(run, 0)
    assert run_state(run).kind == "running"
    beat(run, 0, time=time.time() - LATE_S - 1)
    assert str(run_state(run)) == f"died at step 1: the launcher on a node {DEATHS}"


def test_a_run_of_a_version_without_records(run):
    assert run_state(run).kind == "paused"
    run.log("trainer-0").write_text("RuntimeError: bug in step 3\n")
    assert "RuntimeError: bug in step 3" in run_state(run).reason
    run.final_model.mkdir()
    assert run_state(run).kind == "finished"
    assert run_state(RunDir(run.root / "nothing")).kind == "new"


def test_doctor_names_the_reader_of_a_flight_recorder(run):
    record_attempt(run, "failed", "trainer-0 ended: exit code 1")
    assert "torchfrtrace" not in text(diagnose(run.root))
    run.flight_recorder.with_name("nccl_trace_rank_0").touch()
    assert f"`torchfrtrace {run.logs} --prefix nccl_trace_rank_`" in text(diagnose(run.root))


def test_damaged_records_are_left_out(run):
    run.restarts.write_bytes(b'\xff\n{"time": "late", "event": ["started"]}\n[]\n')
    beat(run, 0, pid=None)
    (run.heartbeats / "trainer-1").write_text("[1]")
    (run.heartbeats / "trainer-x").write_text('{"host": 3')
    assert heartbeats(run) == []
    assert run_state(run).kind == "paused"


def test_the_lock_is_read_without_taking_it(run):
    path = run.root / "run.lock"
    assert not FileLock.is_held(path)
    assert not path.exists()
    with run.take():
        holder = path.read_text()
        assert FileLock.is_held(path)
        assert path.read_text() == holder
        with pytest.raises(LockHeld):
            FileLock(path)
    assert not FileLock.is_held(path)


def test_a_silent_rank_and_the_calls_of_the_others_are_named(run):
    beat(run, 0)
    beat(run, 2)
    beat(run, 1, time=time.time() - 65, call="forward (train/actor/forward.py, line 9)", waits=False)
    beats = heartbeats(run)
    assert [b.rank for b in beats] == [0, 1, 2]
    assert hang(beats, time.time()).startswith(
        "rank 1 (process 101 on node1) shows no sign of life for 0:01:05, in forward_backward of step 7, forward "
        "(train/actor/forward.py, line 9); ranks 0, 2 wait in forward_backward, all_reduce (train/actor/layout.py, "
        "line 41)"
    )
    assert hang(beats, time.time(), 1800) == ""


def test_a_rank_without_progress_hangs_only_if_others_wait_for_it(run):
    beat(run, 0, waits=False, since=time.time() - 65, call="forward (train/actor/forward.py, line 9)")
    assert hang(heartbeats(run), time.time()) == ""
    beat(run, 1)
    assert hang(heartbeats(run), time.time()).startswith("rank 0 (process 100 on node0) does not advance for 0:01:05")


def test_a_rank_stopped_early_in_a_long_phase_is_silent_and_not_busy(run):
    """Its phase began 8 s before its last heartbeat, so the phase is late before the heartbeat is."""
    now = time.time()
    beat(run, 0, time=now)
    beat(run, 1, time=now - 55, since=now - 63, waits=False)
    beats = heartbeats(run)
    assert hang(beats, now, 60) == ""
    assert hang(beats, now + 6, 60).startswith("rank 1 (process 101 on node1) shows no sign of life for 0:01:01")


@pytest.mark.parametrize("late", [-3600.0, 0.0, 3600.0])
def test_a_reader_dates_heartbeats_by_its_own_clock(run, late, monkeypatch):
    """`late`: the seconds by which the node's clock differs."""
    now = 1e9
    monkeypatch.setattr(time, "time", lambda: now)
    reader = HeartbeatReader(run)
    for age in (0.0, 5.0, 5.0, 65.0):
        now = 1e9 + age
        beat(run, 0, time=1e9 + late + min(age, 5.0), since=1e9 + late - 10, waits=False)
        (dated,) = reader.read()
        assert (now - dated.time, now - dated.since) == (max(age - 5.0, 0.0), age + 10.0)
    assert hang([dated], now).startswith("rank 0 (process 100 on node0) shows no sign of life for 0:01:00")


PROGRAM = """
import sys, time
from pathlib import Path
from dppo_megatron.common import heartbeat
heartbeat.INTERVAL_S = 0.05
heartbeat.start(Path(sys.argv[1]))
heartbeat.moved(step=4, phase="train")
with heartbeat.in_phase("optimizer"):
    time.sleep(60)
"""


def test_a_process_writes_where_it_is(run):
    path = run.heartbeats / "trainer-0"
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)])
    try:
        deadline = time.monotonic() + 60
        while not (beats := heartbeats(run)) or beats[0].phase != "optimizer":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert (beats[0].step, beats[0].pid, beats[0].waits) == (4, process.pid, False)
        assert os.path.getsize(path) == heartbeat.BYTES
    finally:
        process.kill()
        process.wait()
