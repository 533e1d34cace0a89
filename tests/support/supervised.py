"""Runs Python with these arguments, and leaves no process and no temporary file, however it ends.

    python tests/support/supervised.py -m pytest tests

All processes get a separate temporary directory. All of them, including daemons and other sessions, are killed when the
command ends, after SIGTERM or SIGINT, and when this process's parent dies, for example `make` after a SIGKILL.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_S = 5.0
TRACKER = b"resource_tracker"  # removes files of dead processes from /dev/shm, and then ends by itself


class Signalled(BaseException):
    pass


def main(arguments: list[str]) -> int:
    parent = os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _raise)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    directory = tempfile.mkdtemp(prefix="dppo-")
    os.chmod(directory, 0o1777)  # like /tmp: some tests run as another user
    command = None
    try:
        if os.getppid() != parent:
            raise Signalled(signal.SIGTERM)
        command = subprocess.Popen([sys.executable, *arguments], env=os.environ | {"TMPDIR": directory})
        return _wait_for(command.pid)
    except Signalled as ended:
        if command is not None and ended.args[0] == signal.SIGINT:  # Ctrl-C reached the command, too, so let it report
            with contextlib.suppress(subprocess.TimeoutExpired):
                command.wait(GRACE_S)
        return 128 + ended.args[0]
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _kill_children()
        shutil.rmtree(directory, ignore_errors=True)


def _raise(number: int, _frame: FrameType | None) -> None:
    raise Signalled(number)


def _wait_for(pid: int) -> int:
    while True:
        ended, status = os.wait()  # also for orphans
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def _kill_children() -> None:
    """Kill every child, then the children that these leave, until none remain."""
    deadline = time.monotonic() + GRACE_S
    while children := _children():
        for pid in children:
            with contextlib.suppress(OSError):
                if time.monotonic() > deadline or TRACKER not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
