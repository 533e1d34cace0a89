"""A run on this machine with stubs for its processes: exit codes, messages, and that nothing is left behind."""

import contextlib
import errno
import fcntl
import os
import signal
import socket
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import typer

from dppo_megatron.cli import runs
from dppo_megatron.common.files import write_json
from dppo_megatron.config import ConfigError, read_config, save_resolved, with_absolute_paths
from dppo_megatron.errors import ExpectedError
from dppo_megatron.report.run_state import heartbeats, run_state
from dppo_megatron.run.launch.launcher import RunPlan
from dppo_megatron.run.launch.local_run import LocalRun, finished
from dppo_megatron.run.slurm import job
from dppo_megatron.run.slurm.allocation import Allocation
from dppo_megatron.run_dir import RunDir
from dppo_megatron.train.trainer.checkpoints import Checkpoints
from tests.support.configs import make_config
from tests.support.launched import BEATS, ENDLESS, TRAINS, Launched, check_gone


def test_a_run_that_is_done_exits_0_and_ends_its_engine(launch):
    run = launch(TRAINS)
    engine = run.wait_for_children()["engine-0"]
    run.gate.touch()
    assert run.process.wait(60) == 0, run.output.read_text()
    check_gone({"engine-0": engine})


def check_ended(run: Launched, children: dict[str, psutil.Process], number: signal.Signals) -> None:
    """A signal ends every process, and the command says how to resume."""
    run.run.bank.mkdir()
    run.process.send_signal(number)
    assert run.process.wait(60) == 128 + number
    check_gone(children)
    said = run.output.read_text()
    assert f"{number.name}: stopping; bank and checkpoints in {run.run.root} are kept; resume with `dppo-" in said
    assert f"train {run.run.config} --resume`" in said


@pytest.mark.slow
def test_a_stopped_rank_ends_the_run(launch):
    """SIGSTOP, as a frozen machine. The message names rank, process, host, phase and step."""
    run = launch(BEATS + ENDLESS, stall_s=10.0)
    children = run.wait_for_children()
    run.wait_until(lambda: [b.phase for b in heartbeats(run.run)] == ["optimizer"] * 2)
    children["trainer-1"].suspend()
    assert run.process.wait(60) == 1
    check_gone(children)
    named = f"rank 1 (process {children['trainer-1'].pid} on {socket.gethostname()}) shows no sign of life for 0:00:1"
    assert named in run.output.read_text()
    assert "in optimizer of step 7" in run.output.read_text()
    state = run_state(run.run)
    assert (state.kind, state.reason.startswith(named)) == ("died", True)


@pytest.mark.slow
def test_control_c_ends_every_process(launch):
    run = launch(ENDLESS)
    check_ended(run, run.wait_for_children(), signal.SIGINT)


def test_a_killed_engine_is_started_again_and_sigterm_ends_every_process(launch):
    run = launch(ENDLESS)
    children = run.wait_for_children()
    children["engine-0"].kill()
    run.wait_until(lambda: "engine-0 serves again" in run.output.read_text())
    again = run.wait_for_children()
    assert again["engine-0"].pid != children["engine-0"].pid
    check_ended(run, again, signal.SIGTERM)


def test_a_killed_launcher_leaves_no_process_and_its_lock_only_as_long_as_they_run(launch, monkeypatch):
    run = launch("signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), sys.exit(0)))\n" + ENDLESS)
    children = run.wait_for_children()
    with pytest.raises(ExpectedError, match=rf"in use by process {run.process.pid} on .* since .*; stop"):
        run.run.take()
    run.process.kill()
    run.process.wait()
    with monkeypatch.context() as patch:
        patch.setattr("dppo_megatron.run_dir.ENDING_S", 0.0)
        with pytest.raises(ExpectedError, match="which ended, but processes that it started still run"):
            run.run.take()
    with run.run.take():  # waits for them
        assert not [child for child in children.values() if child.is_running() and child.status() != "zombie"]


@pytest.mark.parametrize("command", ["train", "job"])
def test_a_second_launcher_stops_before_it_touches_the_run(tmp_path, monkeypatch, command):
    config = make_config(run={"dir": tmp_path / "run"}, train={"steps": 3}, model={"path": "nowhere"})
    run, file = RunDir(tmp_path / "run"), tmp_path / "config.yaml"
    save_resolved(config, file)
    run.root.mkdir()
    run.config.write_text(file.read_text())
    run.metrics.write_text("{}\n")

    def state():
        return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in run.root.glob("[!r]*")}

    before = state()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "LOCK_S", 0.0)
    monkeypatch.setattr(job, "check_job", lambda *_, **__: None)
    monkeypatch.setattr(Allocation, "current", lambda: Allocation("7", 1, (("a",),)))
    with run.take(), pytest.raises(ExpectedError, match=f"in use by process {os.getpid()} on {socket.gethostname()}"):
        job.run_job(file, (), resume=False) if command == "job" else runs.train(file, resume=True)
    assert state() == before


def test_a_finished_run_is_not_started_again(tmp_path, monkeypatch, capsys):
    """Finished: the last checkpoint, the model after it and the last evaluation."""
    monkeypatch.chdir(tmp_path)
    config = make_config(run={"dir": "run"}, train={"steps": 3}, data={"train": "d", "eval": "e"})
    file, run = tmp_path / "config.yaml", RunDir(Path("run"))
    save_resolved(config, file)
    run.checkpoints.mkdir(parents=True)
    save_resolved(with_absolute_paths(config), run.config)
    (run.checkpoints / "latest").write_text("step-000003")
    run.metrics.write_text('{"step": 3, "time": 1.0, "train/loss": 1.0}\n')
    run.final_model.mkdir()
    assert not finished(config)
    with run.metrics.open("a") as metrics:
        metrics.write('{"step": 3, "time": 2.0, "eval/accuracy": 0.5}\n')
    os.utime(run.final_model, (1, 1))
    assert not finished(config)
    os.utime(run.final_model)
    runs.train(file, resume=True)
    out = capsys.readouterr().out
    assert out.startswith("3 steps are done, train.steps = 3; raise it above 3 to continue\n")
    assert out.splitlines()[-4:] == [
        f"report: {tmp_path / 'run' / 'report' / 'report.md'}",
        "model: run/model",
        "next: dppo-megatron view run --open",
        "      dppo-megatron eval run/config.yaml",
    ]


class NoProcesses:
    """Replaces `LocalRun`, and keeps its lock."""

    def __init__(self, config, plan, lock):
        NoProcesses.lock = lock.descriptor

    def run(self) -> int:
        return 3


@pytest.fixture
def command(tmp_path, monkeypatch):
    """`train` with relative paths in tmp_path and the given function as preflight."""

    def train(preflight, **settings) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("dppo_megatron.run.launch.local_run.LocalRun", NoProcesses)
        if preflight is not None:
            monkeypatch.setattr("dppo_megatron.run.checks.preflight", preflight)
        config = make_config(
            run={"dir": "runs/a"}, train={"steps": 3}, model={"path": "m"}, data={"train": "d"}, **settings
        )
        save_resolved(config, tmp_path / "config.yaml")
        runs.train(Path("config.yaml"))

    return train


def test_a_rejected_config_leaves_nothing(command, tmp_path):
    with pytest.raises(ConfigError, match=r"model.path = m: no such directory"):
        command(None)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_train_records_absolute_paths(command, tmp_path):
    with pytest.raises(typer.Exit) as ended:
        command(lambda *_: ["a note"], engine={"python": "python3"})
    assert ended.value.exit_code == 3
    saved = read_config(tmp_path / "runs/a/config.yaml")
    assert (saved.run.dir, saved.model.path) == (tmp_path / "runs/a", tmp_path / "m")
    assert saved.data.train == tmp_path / "d"
    assert saved.engine.python == Path("python3"), "found on PATH"


def test_of_two_simultaneous_starts_one_is_refused(command, tmp_path):
    """The other one starts while this one is in preflight."""
    run = RunDir(tmp_path / "runs/a")
    with contextlib.ExitStack() as other, pytest.raises(ExpectedError, match="in use by process"):
        command(lambda *_: other.enter_context(run.take()) and [])
    assert not run.config.exists()

    def trained(*_) -> list[str]:
        run.bank.mkdir()
        return []

    with pytest.raises(ConfigError, match="already contains a run"):
        command(trained)
    assert not run.config.exists()


def test_without_locks_the_run_goes_on(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunDir(tmp_path).take(), RunDir(tmp_path).take():
        pass


def test_a_run_without_a_trainer_waits_for_its_engines(tmp_path):
    """As `dppo-megatron sample` starts it."""
    config = make_config(run={"dir": tmp_path})
    waits = LocalRun(config, RunPlan([], None, []))._waits_for
    assert "engine-0 loads the model" in waits()
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "engine-0.json").touch()
    assert waits() == f"the engines sample; see {tmp_path / 'logs' / 'orchestrator.log'}"


def test_a_run_without_a_last_checkpoint_is_finished_when_its_model_is_written(tmp_path):
    config = make_config(
        run={"dir": tmp_path}, train={"steps": 3}, checkpoint={"final": False, "every": 1}, data={"eval": None}
    )
    run = RunDir(tmp_path)
    due = Checkpoints(config, Mock()).due
    assert [due(step) for step in (1, 2, 3)] == [True, True, False]
    run.final_model.mkdir()
    assert not finished(config)
    write_json(run.finished, 3)
    assert run.done == 3
    assert finished(config)
    run.checkpoints.mkdir()
    (run.checkpoints / "latest").write_text("step-000002")
    os.utime(run.final_model, (1, 1))  # of an earlier attempt
    assert not finished(config)
