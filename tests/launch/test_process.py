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
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    ("code", "text"), [(1, "exit code 1"), (-9, "killed by SIGKILL"), (-99, "killed by signal 99")]
)
def test_exit_reason(code, text):
    assert exit_reason(code) == text
