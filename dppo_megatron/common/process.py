"""Start a child process with a separate session and log file, and terminate all processes in this session."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from .environment import child_environment
from .file_lock import FileLock

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2
_LIBC = ctypes.CDLL(None)  # loaded before any fork


class Child:
    """Starts `command` in a separate session with output appended to `log`.

    The kernel sends the child SIGTERM if this process dies without terminating the child (`follow_parent`). All
    processes in the session are terminated together, so that a server's workers do not outlive the server. lock: a lock
    that the child inherits.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        lock: FileLock | None = None,
    ):
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment(env),
                start_new_session=True,
                pass_fds=() if lock is None else (lock.descriptor,),
                preexec_fn=with_this_process(),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the child runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def end(self, grace_s: float) -> None:
        """Send SIGTERM to the child, then SIGKILL to the session after `grace_s`. Return when the child has exited."""
        members = self._session()
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and any(p.is_running() and not _is_zombie(p) for p in members):
            self._process.poll()
            time.sleep(0.02)
        for process in {*members, *self._session()}:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def _session(self) -> set[psutil.Process]:
        """Return every process in the child's session, including orphans."""
        members = set()
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, PermissionError):
                if os.getsid(process.pid) == self._process.pid:
                    members.add(process)
        return members


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def with_this_process() -> Callable[[], None]:
    """Return a `preexec_fn` that makes a child receive SIGTERM when this process dies."""
    return partial(end_with_parent, os.getpid())


def end_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Make the kernel send this process signal `number` when `parent` dies. Call it as `preexec_fn`.

    `parent` is the process that starts this one.
    """
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)  # until exec the parent's handler would receive it and ignore it
    _LIBC.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(1)


def follow_parent() -> None:
    """Kill this process and its process group as soon as the parent dies, if this process was started as a `Child`.

    SIGTERM does not suffice: a trainer then waits for its step, and perhaps for engines that no longer exist. A
    server's workers do not receive the signal.
    """
    number, parent = ctypes.c_int(), os.getppid()
    _LIBC.prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
    if number.value and os.getpgrp() == os.getpid():
        threading.Thread(target=_follow, args=(parent,), name="follow-parent", daemon=True).start()


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os.killpg(0, signal.SIGKILL)


def raise_open_files_limit(fallback: int) -> int:
    """Raise the soft limit of open files to the hard limit, or to `fallback` without a hard limit. Return that limit.

    A shell's soft limit is often 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = fallback if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
    return limit


def exit_reason(code: int) -> str:
    """Return `exit code 1`, or the name of the signal that terminated the process."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
