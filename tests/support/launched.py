"""Starts a run on this machine with stub processes that behave as a test asks."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from dppo_megatron.common.retry import wait_until
from dppo_megatron.config import save_resolved
from dppo_megatron.run_dir import RunDir
from tests.support.configs import make_config

# Runs the config with child processes that write their process id and then behave as the test asks.
PROGRAM = """
import sys
from pathlib import Path
from dppo_megatron.run.checks import load_config
from dppo_megatron.run.launch import local_processes
from dppo_megatron.run.launch.local_run import LocalRun
from dppo_megatron.run_dir import RunDir

def command(role, *arguments):
    return [sys.executable, "-c", Path(sys.argv[2]).read_text(), role, sys.argv[2], *arguments]

local_processes.dppo_command = command
config = load_config(Path(sys.argv[1]))
with RunDir(config.run.dir).take() as lock:
    sys.exit(LocalRun(config, local_processes.local_plan(config, resume=False), lock).run())
"""
STUB = """
import json, os, pathlib, signal, sys, time
role, directory = sys.argv[1], pathlib.Path(sys.argv[2]).parent
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if role == "engine":
    service = directory / "run" / "services" / "engine-0.json"
    service.parent.mkdir(exist_ok=True)
    service.write_text(json.dumps({"name": "engine-0", "url": "http://127.0.0.1:9", "pid": os.getpid(), "host": ""}))
note = directory / f"{role}-{os.environ.get('RANK', 0)}"
note.with_suffix(".tmp").write_text(str(os.getpid()))
note.with_suffix(".tmp").rename(note)
"""
ENDLESS = "time.sleep(600)\n"
TRAINS = """
while not (directory / "gate").exists():
    time.sleep(0.05)
if role == "trainer":
    latest = directory / "run" / "checkpoints" / "latest"
    latest.parent.mkdir(exist_ok=True)
    latest.write_text("step-000003")
time.sleep(600 if role == "engine" else 0)
"""
BEATS = """
if role == "trainer":
    from dppo_megatron.common import heartbeat
    heartbeat.INTERVAL_S = 0.2
    heartbeat.start(directory / "run" / "heartbeats" / f"trainer-{os.environ['RANK']}")
    heartbeat.moved(step=7, phase="optimizer")
"""
ROLES = ("engine-0", "orchestrator-0", "trainer-0", "trainer-1")


class Launched:
    """Runs the command in a separate process, and finds child processes by name."""

    def __init__(self, directory: Path, behaviour: str, stall_s: float = 1800.0, **engine):
        self.directory, self.run = directory, RunDir(directory / "run")
        run = {"dir": self.run.root, "stall_timeout_s": stall_s}
        config = make_config(run=run, train={"steps": 3}, parallel={"world_size": 2}, engine=engine)
        self.run.root.mkdir()
        save_resolved(config, self.run.config)
        stub = directory / "stub.py"
        stub.write_text(STUB + behaviour)
        self.output, self.gate = directory / "output", directory / "gate"
        with self.output.open("w") as output:
            command = [sys.executable, "-c", PROGRAM, str(self.run.config), str(stub)]
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def wait_for_children(self) -> dict[str, psutil.Process]:
        self.wait_until(lambda: all((self.directory / name).exists() for name in ROLES))
        return {name: psutil.Process(int((self.directory / name).read_text())) for name in ROLES}

    def wait_until(self, condition) -> None:
        assert wait_until(condition, timeout_s=60, poll_s=0.05), self.output.read_text()


@contextmanager
def launches(directory: Path) -> Iterator[Callable[..., Launched]]:
    """Yield a function f(behaviour, **settings) that starts a run in `directory`. Kills the commands at the end."""
    launched = []

    def start(behaviour: str, **settings) -> Launched:
        launched.append(Launched(directory, behaviour, **settings))
        return launched[-1]

    yield start
    for run in launched:
        run.process.kill()
        run.process.wait()


def check_gone(children: dict[str, psutil.Process]) -> None:
    _, alive = psutil.wait_procs(children.values(), timeout=20)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
