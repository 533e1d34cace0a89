"""Supervised children: real processes, real signals."""

import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from dppo_megatron.common.process import Child, exit_reason
from dppo_megatron.common.retry import wait_until

PRELUDE = """
import os, pathlib, signal, subprocess, sys, time
from pathlib import Path

IGNORES_SIGTERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"

def note(name, pid):
    Path(f"{name}.tmp").write_text(str(pid))
    Path(f"{name}.tmp").rename(name)
"""


def wait_for(condition) -> None:
    assert wait_until(condition, timeout_s=60, poll_s=0.02), "timed out"


def python(source):
    return [sys.executable, "-c", PRELUDE + textwrap.dedent(source)]


def gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def check_ends_with_its_parent(source, directory, *names):
    """The processes that `source` notes in files of these names are gone after its own process was killed."""
    parent = subprocess.Popen(python(source), cwd=directory)
    wait_for(lambda: all((directory / name).exists() for name in names))
    processes = [psutil.Process(int((directory / name).read_text())) for name in names]
    parent.kill()
    parent.wait()
    wait_for(lambda: all(map(gone, processes)))


def test_output_and_exit_code_are_kept(tmp_path):
    child = Child("x", python("import sys; print('hello'); sys.exit(3)"), tmp_path / "logs/x.out")
    wait_for(lambda: child.poll() is not None)
    assert child.poll() == 3
    assert "hello" in child.log.read_text()


def test_ending_a_child_ends_its_whole_session_even_orphans_that_ignore_sigterm(tmp_path):
    grandchild = tmp_path / "grandchild"
    source = f"""
        note({str(grandchild)!r}, subprocess.Popen([sys.executable, "-c", IGNORES_SIGTERM]).pid)
        time.sleep(600)
    """
    child = Child("x", python(source), tmp_path / "x.out")
    wait_for(grandchild.exists)
    orphan = psutil.Process(int(grandchild.read_text()))
    os.kill(child.pid, signal.SIGKILL)  # the parent dies first, as a crashed server does
    child.end(grace_s=0.5)
    wait_for(lambda: gone(orphan))


@pytest.mark.parametrize("delay", ["before", "after"])
def test_a_parent_killed_between_fork_and_exec_leaves_nothing(tmp_path, delay):
    """The moment is short, so the test delays it: before the call to the kernel, and after it, while a signal still
    runs the handler that the child inherited."""
    source = f"""
        from dppo_megatron.common import process

        class Slow:
            def prctl(self, *arguments):
                if {delay!r} == "after":
                    libc.prctl(*arguments)
                note("pid", os.getpid())
                deadline = time.monotonic() + 1
                while time.monotonic() < deadline:
                    time.sleep(0.01)
                if {delay!r} == "before":
                    libc.prctl(*arguments)

        libc, process._LIBC = process._LIBC, Slow()
        signal.signal(signal.SIGTERM, lambda *_: None)
        process.Child("x", ["sleep", "600"], Path("x.out"))
    """
    check_ends_with_its_parent(source, tmp_path, "pid")


def test_a_command_that_waits_after_sigterm_ends_with_its_parent_and_with_its_workers(tmp_path):
    """A trainer finishes its step after SIGTERM, and a server has workers."""
    body = """
        from dppo_megatron.common.process import follow_parent
        follow_parent()
        signal.signal(signal.SIGTERM, lambda *_: None)
        note("worker", subprocess.Popen([sys.executable, "-c", IGNORES_SIGTERM]).pid)
        while True:
            time.sleep(1)
    """
    source = f"""
        from dppo_megatron.common.process import Child
        note("child", Child("x", {python(body)!r}, Path("x.out")).pid)
        time.sleep(600)
    """
    check_ends_with_its_parent(source, tmp_path, "child", "worker")


@pytest.mark.parametrize(
    ("code", "text"), [(1, "exit code 1"), (-9, "killed by SIGKILL"), (-99, "killed by signal 99")]
)
def test_exit_reason(code, text):
    assert exit_reason(code) == text
