"""All engines of an evaluation or a study end with it, also after an error. The children start nothing."""

import pytest

from dppo_megatron.config import Config
from dppo_megatron.errors import ExpectedError
from dppo_megatron.rollout.fleet.registry import register
from dppo_megatron.run.launch import local_processes
from dppo_megatron.run.launch.engine import EngineStartError
from dppo_megatron.run.launch.own_engines import running_engines
from dppo_megatron.run_dir import RunDir
from tests.support.configs import make_config


@pytest.fixture
def config(tmp_path) -> Config:
    return make_config(run={"dir": tmp_path / "run"}, data={"train": "t"}, engine={"count": 2})


@pytest.fixture
def ended(monkeypatch) -> list[str]:
    """Names of the children that were ended. A test sets the start of engine-1."""
    names = []

    class Child:
        def __init__(self, name, command, log, env, lock):
            self.name, self.log = name, log
            if name == "engine-1":
                Child.start_second(self)
            else:
                register(RunDir(log.parents[1]), name, f"http://{name}", 1)

        def poll(self):
            return 3 if self.name == "engine-1" else None

        def signal(self, number):
            pass

        def end(self, grace_s):
            names.append(self.name)

    monkeypatch.setattr(local_processes, "Child", Child)
    monkeypatch.setattr(local_processes, "visible_devices", list)
    return names


def second(monkeypatch, start) -> None:
    monkeypatch.setattr(local_processes.Child, "start_second", start, raising=False)


def test_engines_are_ended_after_the_block_that_uses_them_even_if_it_fails(config, ended, monkeypatch):
    second(monkeypatch, lambda child: register(RunDir(config.run.dir), child.name, "http://two", 1))
    with running_engines(config) as urls:
        assert urls == ["http://engine-0", "http://two"]
        assert ended == []
    assert ended == ["engine-0", "engine-1"]
    with pytest.raises(KeyboardInterrupt), running_engines(config):
        raise KeyboardInterrupt
    assert ended == 2 * ["engine-0", "engine-1"]


def test_an_engine_that_ends_while_starting_is_one_error_with_its_last_lines(config, ended, monkeypatch):
    def fail(child):
        child.log.parent.mkdir(parents=True, exist_ok=True)
        child.log.write_text("starting\nOutOfMemoryError: 80 GB\n")

    second(monkeypatch, fail)
    with pytest.raises(EngineStartError) as raised, running_engines(config):
        raise AssertionError("it does not get here")
    assert isinstance(raised.value, ExpectedError), "printed without a traceback"
    assert str(raised.value).startswith("engine-1 ended while starting: exit code 3. Its last lines (")
    assert str(raised.value).endswith("/engine-1.log):\n  starting\n  OutOfMemoryError: 80 GB")
    assert ended == ["engine-0", "engine-1"]


def test_the_first_is_ended_when_the_second_cannot_be_started(config, ended, monkeypatch):
    def fail(child):
        raise OSError("too many processes")

    second(monkeypatch, fail)
    with pytest.raises(OSError, match="too many processes"), running_engines(config):
        raise AssertionError("it does not get here")
    assert ended == ["engine-0"]
