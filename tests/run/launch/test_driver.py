"""The driver starts all processes, ends them in order, and recognizes the end of a run."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from dppo_megatron.run.launch.driver import Completed, Failed, RunDriver, TrainerStopped
from dppo_megatron.run.launch.launcher import RunPlan
from dppo_megatron.run.launch.local_processes import ProcessPlan
from dppo_megatron.run_dir import RunDir
from tests.support.configs import make_config

STEPS = 3


@dataclass
class FakeProcess:
    name: str
    code: int | None = None
    log: Path = Path("log")

    def poll(self):
        return self.code


class FakeLauncher:
    def __init__(self, run: RunDir):
        self.secret, self.secrets = run.secret, []  # whether it was there at each start
        self.started: dict[str, FakeProcess] = {}
        self.ended: list[list[str]] = []

    def start(self, plan):
        self.secrets.append(self.secret.exists())
        return self.started.setdefault(plan.name, FakeProcess(plan.name))

    def end(self, processes, grace_s):
        self.ended.append([process.name for process in processes])


@pytest.fixture
def run(tmp_path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture
def launcher(run) -> FakeLauncher:
    return FakeLauncher(run)


@pytest.fixture
def reported() -> list[str]:
    return []


@pytest.fixture
def driver(run, launcher, reported) -> RunDriver:
    """The driver of a run with an engine, an orchestrator and two ranks, which were started."""
    config = make_config(run={"dir": run.root}, train={"steps": STEPS})
    driver = RunDriver(config, launcher, reported.append)
    engine, orchestrator, *trainers = (
        ProcessPlan(name, ()) for name in ("engine-0", "orchestrator", "trainer-0", "trainer-1")
    )
    driver.start(RunPlan([engine], orchestrator, trainers))
    return driver


def test_the_secret_is_there_before_anything_starts(driver, launcher, run):
    assert launcher.secrets == [True] * 4
    secret = run.secret.read_text()
    RunDriver(driver._config, launcher, print).start(RunPlan([ProcessPlan("engine-0", ())], None, []))
    assert run.secret.read_text() == secret, "the engines of a run that is resumed have another one"


def save_checkpoint(run: RunDir, step: int) -> None:
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    (run.checkpoints / "latest").write_text(f"step-{step:06d}")


def test_everything_is_started_and_workers_end_before_the_engines_that_they_need(driver, launcher):
    assert list(launcher.started) == ["engine-0", "orchestrator", "trainer-0", "trainer-1"]
    assert driver.check() is None
    driver.end_all()
    assert launcher.ended == [["orchestrator", "trainer-0", "trainer-1"], ["engine-0"]]


@pytest.mark.parametrize("name", ["orchestrator", "trainer-1", "engine-0"])
def test_a_process_that_failed_ends_the_run(driver, launcher, name):
    launcher.started[name].code = 3
    assert driver.check() == Failed(launcher.started[name], f"{name} ended: exit code 3")


def test_the_cause_names_an_engine_that_ended_with_code_0(driver, launcher):
    launcher.started["engine-0"].code = 0
    assert driver.check() == Failed(launcher.started["engine-0"], "engine-0 ended: exit code 0")


@pytest.mark.parametrize("name", ["engine-0", "teacher-sums"])
def test_an_engine_that_served_is_restarted_and_reported(driver, launcher, run, reported, name):
    """A teacher registers in its own run directory."""
    teacher = RunDir(run.root / "teachers" / "sums")
    driver.start(RunPlan([ProcessPlan("teacher-sums", (), home=teacher.root)], None, []))
    registration = (teacher if name == "teacher-sums" else run).services / "engine-0.json"
    registration.parent.mkdir(parents=True)
    registration.write_text('{"name": "engine-0", "url": "http://127.0.0.1:9", "pid": 1, "host": ""}')
    assert driver.check() is None
    launcher.started[name].code = -9
    assert driver.check() is None
    assert not registration.exists()
    assert [f"{name} ended: killed by SIGKILL. Restart 1 of 5" in line for line in reported] == [True]


def test_warnings_in_logs_are_reported(driver, run, reported):
    run.log("orchestrator").parent.mkdir(parents=True)
    run.log("orchestrator").write_text("2026-11-24 22:39:31,123 orchestrator WARNING a.b: no tools in the template\n")
    assert driver.check() is None
    assert reported == ["orchestrator warns: no tools in the template"]


def test_a_run_is_complete_when_orchestrator_and_ranks_are_done(driver, launcher, run):
    save_checkpoint(run, STEPS)
    for rank in ("trainer-0", "trainer-1"):
        assert not driver.trained
        launcher.started[rank].code = 0
    assert driver.trained
    assert driver.check() is None  # the last evaluation
    launcher.started["orchestrator"].code = 0
    assert driver.check() == Completed()


def test_ranks_that_ended_before_the_last_step_were_stopped(driver, launcher, run):
    save_checkpoint(run, STEPS - 1)
    for rank in ("trainer-0", "trainer-1"):
        launcher.started[rank].code = 0
    assert driver.check() == TrainerStopped()


def test_a_finding_of_the_doctor_is_reported_once(driver, run, reported):
    run.root.mkdir(exist_ok=True)
    masked = {"time": 1.0, "time/step_s": 1.0, "policy/masked_share": 0.9}
    for step in (1, 2):
        with run.metrics.open("a") as file:
            file.write(json.dumps({"step": step} | masked) + "\n")
        driver.check()
    (line,) = reported
    assert line.startswith("doctor: everything masked: 90% of the tokens")


def test_a_resume_of_a_long_run_reads_few_of_its_records(run, launcher, reported):
    run.root.mkdir()
    run.metrics.write_text("".join(json.dumps({"step": s, "train/loss": 0.5}) + "\n" for s in range(1, 1001)))
    driver = RunDriver(make_config(run={"dir": run.root}, train={"steps": 2000}), launcher, reported.append)
    driver.start(RunPlan([], None, []))
    assert driver._examination.examined == 1000
    assert driver._examination._past.steps < 400
