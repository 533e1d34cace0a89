"""The nodes of an engine start with the same settings and end together."""

import signal
import subprocess
import sys
from dataclasses import asdict

import pytest

from dppo_megatron.common.files import write_json
from dppo_megatron.rollout.fleet.registry import ServiceTimeout
from dppo_megatron.run.launch import engine as launched
from dppo_megatron.run.launch.engine import EngineStart, Servers
from dppo_megatron.run_dir import RunDir
from tests.support.actor_cases import write_config
from tests.support.configs import make_config

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def config(tmp_path):
    engine = {"nodes": 2, "tensor_parallel": 4, "start_timeout_s": 0.3}
    return make_config(run={"dir": tmp_path / "run"}, data={"train": "t"}, engine=engine)


def ended() -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", "pass"])


def test_other_nodes_start_with_the_settings_that_node_0_wrote(config, tmp_path, monkeypatch):
    start = EngineStart(str(write_config(tmp_path / "v3")), 3, 8000, "127.0.0.1", 9000)
    meeting, started, run = "engine-0-7.2-0", [], RunDir(config.run.dir)
    monkeypatch.setattr(Servers, "start", lambda _, start, nodes: started.append((start, nodes)) or Servers([ended()]))
    monkeypatch.setattr(launched, "_pass_on_signals", lambda server: None)
    monkeypatch.setattr(launched, "setup_logging", lambda *_: None)
    with pytest.raises(ServiceTimeout, match=r"waited 0 s .*for engine-0 to write .*engine-0-7.2-0.json; see .*0.log"):
        launched.run_engine(config, 0, node=1, meeting=meeting)
    write_json(run.services / f"{meeting}.json", asdict(start))
    launched.run_engine(config, 0, node=1, meeting=meeting)
    assert started == [(start, [1])]
    first, second = (launched.command(config, start, node) for node in (0, 1))
    for command in (first, second):
        assert command[command.index("--master-port") + 1] == str(start.rendezvous_port)
    assert ["--headless" in command for command in (first, second)] == [False, True]


@pytest.mark.parametrize(("node", "end"), [(None, "exit"), (None, "kill"), (1, "exit"), (1, "stop")])
def test_when_one_node_ends_all_end_and_the_engine_failed(config, monkeypatch, node, end):
    """A node without an HTTP server ends with code 0 when a peer is gone: the engine must start again, unless it
    was to stop."""
    run = RunDir(config.run.dir)
    processes = [subprocess.Popen(SLEEP, stdout=subprocess.DEVNULL) for _ in range(1 if node else 2)]
    last = processes.pop() if end == "kill" else ended()
    servers = Servers([*processes, last])
    servers.stopping = end == "stop"
    monkeypatch.setattr(Servers, "start", lambda *_: servers)
    monkeypatch.setattr(launched, "_start", lambda config, run, index: EngineStart("m", 0, 1, "127.0.0.1", 2))
    monkeypatch.setattr(launched, "_serve", lambda config, run, index, start, server: launched._wait_for_end(server))
    monkeypatch.setattr(launched, "_pass_on_signals", lambda server: None)
    monkeypatch.setattr(launched, "setup_logging", lambda *_: None)
    write_json(run.services / "engine-0-1.json", asdict(EngineStart("m", 0, 1, "127.0.0.1", 2)))
    if end == "kill":
        last.kill()
    code = launched.run_engine(config, 0, node=node, meeting="engine-0-1")
    assert code == {"exit": 1, "stop": 0, "kill": 128 + signal.SIGKILL}[end]
    assert all(process.poll() is not None for process in [*processes, last])
