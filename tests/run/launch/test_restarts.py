"""When a server that ended is started again, and when that is given up."""

from pathlib import Path

import pytest

from dppo_megatron.rollout.fleet.registry import register
from dppo_megatron.run.launch.driver import RestartedServer
from dppo_megatron.run.launch.local_processes import ProcessPlan
from dppo_megatron.run_dir import RunDir
from tests.run.launch.test_driver import FakeProcess


class Scene:
    """A server, its launcher, its registration and a clock, all moved by the test."""

    def __init__(self, root: Path):
        self.run, self.now = RunDir(root), 0.0
        self.started: list[FakeProcess] = []
        self.ended: list[FakeProcess] = []
        self.restart()

    def restart(self, limit: int = 3) -> None:
        self.started.clear()
        self.server = RestartedServer(self, ProcessPlan("engine-0", ("engine",)), self.run, limit)

    def announce(self) -> None:
        register(self.run, "engine-0", "http://127.0.0.1:9", 1)

    @property
    def announced(self) -> bool:
        return (self.run.services / "engine-0.json").exists()

    def start(self, plan) -> FakeProcess:
        self.started.append(FakeProcess("engine-0"))
        return self.started[-1]

    def end(self, processes, grace_s) -> None:
        self.ended += processes

    def check(self, after_s: float = 0.0) -> str | None:
        self.now += after_s
        return self.server.check(self.now)

    def serve_and_end(self, served_s: float = 1.0) -> str | None:
        self.announce()
        self.check()
        self.started[-1].code = -9
        return self.check(served_s)


@pytest.fixture
def scene(tmp_path) -> Scene:
    return Scene(tmp_path)


def test_an_engine_that_served_and_was_killed_between_two_looks_is_started_again(scene):
    scene.announce()
    scene.started[-1].code = -9
    assert "Restart 1 of 3" in scene.check()
    assert not scene.server.failed


def test_an_engine_that_ended_is_started_again_after_a_delay(scene):
    assert "engine-0 ended: killed by SIGKILL. Restart 1 of 3 (engine.restarts) in 1 s" in scene.serve_and_end()
    assert not scene.announced  # no request may go to its old address
    assert scene.ended == scene.started  # its own workers, too
    scene.check(0.9)
    assert len(scene.started) == 1
    scene.check(0.1)
    assert len(scene.started) == 2
    scene.announce()
    assert scene.check() == "engine-0 serves again"
    assert scene.check() is None


def test_delays_grow_up_to_a_cap_and_the_run_gives_up(scene):
    scene.restart(limit=8)
    scene.serve_and_end()
    for delay in (1, 2, 4, 8, 16, 32, 60, 60):
        before = len(scene.started)
        scene.check(delay - 0.1)
        assert len(scene.started) == before
        scene.check(0.1)
        assert len(scene.started) == before + 1
        assert not scene.server.failed
        scene.started[-1].code = 1  # ends while starting
        scene.check()
    assert scene.server.failed
    scene.check(1000)
    assert len(scene.started) == 9


def test_a_long_healthy_time_resets_the_count_of_restarts(scene):
    for _ in range(10):
        assert "Restart 1 of 3" in scene.serve_and_end(served_s=300.0)
        scene.check(1.0)
    assert not scene.server.failed


def test_an_engine_that_serves_only_briefly_is_in_a_crash_loop(scene):
    for number in (1, 2, 3):
        assert f"Restart {number} of 3" in scene.serve_and_end(served_s=299.0)
        scene.check(60)
    assert scene.serve_and_end() == "engine-0 is not started again after 3 restarts in a row (engine.restarts)"
    assert scene.server.failed


def test_one_that_never_served_is_not_started_again(scene):
    scene.started[-1].code = 1
    scene.check()
    assert scene.server.failed
