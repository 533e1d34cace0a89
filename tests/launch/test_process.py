"""Supervised children: real processes, real signals."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from dppo_megatron.common.process import Child, exit_reason


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def python(source):
    return [sys.executable, "-c", textwrap.dedent(source)]


def test_output_and_exit_code_are_kept(tmp_path):
    child = Child("x", python("import sys; print('hello'); sys.exit(3)"), tmp_path / "logs/x.out")
    wait_until(lambda: child.poll() is not None)
    assert child.poll() == 3
    assert "hello" in child.log.read_text()


def test_ending_a_child_ends_its_whole_session_even_orphans_that_ignore_sigterm(tmp_path):
    grandchild = tmp_path / "grandchild.pid"
    child = Child(
        "x",
        python(f"""
            import os, signal, subprocess, sys, time
            code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
            open({str(grandchild)!r} + ".tmp", "w").write(str(subprocess.Popen([sys.executable, "-c", code]).pid))
            os.rename({str(grandchild)!r} + ".tmp", {str(grandchild)!r})
            time.sleep(600)
        """),
        tmp_path / "x.out",
    )
    wait_until(grandchild.exists)
    orphan = psutil.Process(int(grandchild.read_text()))
    os.kill(child.pid, signal.SIGKILL)  # the parent dies first, as a crashed server does
    child.end(grace_s=0.5)
    wait_until(lambda: not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE)


def test_a_child_does_not_outlive_its_killed_parent(tmp_path):
    pid_file = tmp_path / "child.pid"
    source = f"""
        import sys, time
        from pathlib import Path
        from dppo_megatron.common.process import Child
        child = Child("x", [sys.executable, "-c", "import time; time.sleep(600)"], Path({str(tmp_path / "x.out")!r}))
        Path({str(pid_file)!r} + ".tmp").write_text(str(child.pid))
        Path({str(pid_file)!r} + ".tmp").rename({str(pid_file)!r})
        time.sleep(600)
    """
    parent = subprocess.Popen(python(source))
    wait_until(pid_file.exists, 60)
    child = psutil.Process(int(pid_file.read_text()))
    parent.kill()
    parent.wait()
    wait_until(lambda: gone(child))


def gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("delay", ["before", "after"])
def test_a_parent_killed_between_fork_and_exec_leaves_nothing(tmp_path, delay):
    """A delay at the spot, for the moment is short: before the kernel is told, and after, while a signal still runs the
    handler that the child inherited."""
    source = f"""
        import os, signal, time
        from pathlib import Path
        from dppo_megatron.common import process

        class Slow:
            def prctl(self, *arguments):
                if {delay!r} == "after":
                    libc.prctl(*arguments)
                Path({str(tmp_path / "pid.tmp")!r}).write_text(str(os.getpid()))
                Path({str(tmp_path / "pid.tmp")!r}).rename({str(tmp_path / "pid")!r})
                deadline = time.monotonic() + 1
                while time.monotonic() < deadline:
                    time.sleep(0.01)
                if {delay!r} == "before":
                    libc.prctl(*arguments)

        libc, process._LIBC = process._LIBC, Slow()
        signal.signal(signal.SIGTERM, lambda *_: None)
        process.Child("x", ["sleep", "600"], Path({str(tmp_path / "x.out")!r}))
    """
    parent = subprocess.Popen(python(source))
    wait_until((tmp_path / "pid").exists, 60)
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    parent.kill()
    parent.wait()
    wait_until(lambda: gone(child))


def test_a_command_that_waits_after_sigterm_ends_with_its_parent_and_with_its_workers(tmp_path):
    """As a trainer does that finishes its step, and a server with workers."""
    body = """
        import pathlib, signal, subprocess, sys, time
        from dppo_megatron.common.process import follow_parent
        follow_parent()
        signal.signal(signal.SIGTERM, lambda *_: None)
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        worker = subprocess.Popen([sys.executable, "-c", code])
        pathlib.Path("pids.tmp").write_text(str(worker.pid))
        pathlib.Path("pids.tmp").rename("pids")
        while True:
            time.sleep(1)
    """
    source = f"""
        import time
        from pathlib import Path
        from dppo_megatron.common.process import Child
        child = Child("x", {python(body)!r}, Path("x.out"))
        Path("child").write_text(str(child.pid))
        time.sleep(600)
    """
    parent = subprocess.Popen(python(source), cwd=tmp_path)
    wait_until((tmp_path / "pids").exists, 60)
    processes = [psutil.Process(int((tmp_path / name).read_text())) for name in ("child", "pids")]
    parent.kill()
    parent.wait()
    wait_until(lambda: all(map(gone, processes)))


@pytest.mark.parametrize(
    ("code", "text"), [(1, "exit code 1"), (-9, "killed by SIGKILL"), (-99, "killed by signal 99")]
)
def test_exit_reason(code, text):
    assert exit_reason(code) == text
