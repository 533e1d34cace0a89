"""Each process of a run dies in each way: `status` and `doctor` read which one and of what, and the run resumes."""

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from dppo_megatron import cli
from tests.support.launched import ENDLESS, ROLES, check_gone, launches

# A process that gets SIGUSR1 fails as the test asks; the log has its traceback, as of a real one.
FAILS = (
    """
def fail(*_):
    %s
signal.signal(signal.SIGUSR1, fail)
"""
    + ENDLESS
)
FULL = 'raise OSError(28, "No space left on device", str(directory / "run" / "checkpoints"))'
DEATHS = {
    "killed": ("pass", signal.SIGKILL, "killed by SIGKILL (the kernel kills a process if memory is short"),
    "raised": ('raise RuntimeError("planted bug")', signal.SIGUSR1, "RuntimeError: planted bug"),
    "disk full": (FULL, signal.SIGUSR1, "OSError: [Errno 28] No space left on device: "),
}


def reading(command: str, run) -> str:
    out, before = io.StringIO(), sys.argv
    sys.argv = ["dppo-megatron", command, str(run), "--json"]
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            cli.main()
    finally:
        sys.argv = before
    return json.dumps(json.loads(out.getvalue()), ensure_ascii=False)


def check_read(run, *texts: str) -> None:
    for command in ("status", "doctor"):
        shown = reading(command, run)
        for text in texts:
            assert text in shown, (command, shown)


@pytest.mark.parametrize("name", [name for name in ROLES if name != "trainer-0"])
@pytest.mark.parametrize("death", [pytest.param(d, marks=pytest.mark.slow if d != "killed" else ()) for d in DEATHS])
def test_a_dead_process_ends_the_run_and_its_death_is_read(launch, name, death):
    body, number, reason = DEATHS[death]
    run = launch(FAILS % body, restarts=0)
    children = run.wait_for_children()
    children[name].send_signal(number)
    assert run.process.wait(60) == 1
    check_gone(children)
    ended = f"{name.replace('orchestrator-0', 'orchestrator')} ended: "
    for text in (run.output.read_text(), run.run.log("train").read_text()):
        assert ended in text
        assert reason.removesuffix(": ") in text or death != "killed"
    assert "the run stopped; there is nothing to resume yet; correct the cause" in run.output.read_text()
    check_read(run.run.root, ended, reason)


def test_a_dead_launcher_and_a_reboot_are_read_and_the_run_can_be_taken_again(launch):
    run = launch(ENDLESS)
    children = run.wait_for_children()
    for process in (run.process, *children.values()):  # a reboot ends all at once
        process.kill()
    run.process.wait()
    check_gone(children)
    check_read(run.run.root, f"the launcher on {socket.gethostname()} was killed, its machine failed, or its disk")
    with run.run.take():
        pass


@pytest.mark.slow
def test_a_disk_without_a_byte_left_is_read(tmp_path):
    """The log of the process that failed lacks the error, for which there was no space."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this machine allows no mount")
    try:
        fills = 'file = open(directory / "run" / "fill", "wb", 0)\n    while True: file.write(bytes(4096))'
        with launches(disk) as launch:
            run = launch(FAILS % fills, restarts=0)
            children = run.wait_for_children()
            children["trainer-1"].send_signal(signal.SIGUSR1)
            assert run.process.wait(60) == 1
            check_gone(children)
            check_read(run.run.root, f"trainer-1 ended: exit code 1 (no space is left in {run.run.logs}")
            os.unlink(run.run.root / "fill")
            with run.run.take():
                pass
    finally:
        shutil.rmtree(disk, ignore_errors=True)
        subprocess.run(["umount", "-l", disk], check=True)
