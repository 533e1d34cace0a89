"""A run of the tests leaves no process and no temporary file, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "supervised.py"
# A server with a session of its own, whose parent is dead, and a temporary directory.
BODY = """
import os, subprocess, sys, tempfile, time
from pathlib import Path
notes = Path(sys.argv[1])
code = 'import os, time; os.setsid(); os.fork() and os._exit(0); print(os.getpid(), flush=True); time.sleep(60)'
server = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True)
notes.with_suffix('.tmp').write_text(f'{server.stdout.readline()} {os.getpid()} {tempfile.mkdtemp()}')
notes.with_suffix('.tmp').rename(notes)
time.sleep(float(sys.argv[2]))
sys.exit(3)
"""


def start(tmp_path: Path, seconds: float, *before: str) -> tuple[subprocess.Popen, list[int], Path]:
    """Return the process, the pids of command and server, and the temporary directory of the command."""
    notes = tmp_path / "notes"
    command = [*before, sys.executable, str(SCRIPT), "-c", BODY, str(notes), str(seconds)]
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 30
    while not notes.exists():
        assert time.monotonic() < deadline, "the command did not start within 30 s"
        time.sleep(0.02)
    server, pid, directory = notes.read_text().split()
    return process, [int(server), int(pid)], Path(directory)


def wait_until_ended(pids: list[int], directory: Path) -> None:
    deadline = time.monotonic() + 20
    while any(map(psutil.pid_exists, pids)) or directory.parent.exists():
        assert time.monotonic() < deadline, (pids, directory)
        time.sleep(0.02)


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGINT])
def test_nothing_remains(tmp_path, number):
    process, pids, directory = start(tmp_path, 0.1 if number is None else 60)
    assert directory.parent.name.startswith("dppo-")
    if number is not None:
        for pid in (process.pid, *([pids[1]] if number == signal.SIGINT else [])):  # Ctrl-C reaches both
            os.kill(pid, number)
    assert process.wait(30) == (3 if number is None else 128 + number)
    wait_until_ended(pids, directory)


def test_nothing_remains_after_its_parent_is_killed(tmp_path):
    """As a `make` that receives SIGKILL."""
    fork = "import os, subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); os.wait()"
    process, pids, directory = start(tmp_path, 60, sys.executable, "-c", fork)
    (supervisor,) = psutil.Process(process.pid).children()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until_ended([*pids, supervisor.pid], directory)
