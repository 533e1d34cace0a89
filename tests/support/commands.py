"""Runs `dppo-megatron` commands as forks of a process with all imports, to save five seconds per command.

Processes that a command starts (ranks, orchestrator, the command `engine`) are forks of the command. A `real` command
starts them as in production. Servers are always real.
"""

import atexit
import ctypes
import faulthandler
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.ranks import fork_server

MODULE = ["-m", "dppo_megatron"]
ARG_START = 45  # in /proc/PID/stat, of the fields after the name


class Command:
    """Represents a running command, with the methods of `subprocess.Popen`. Output is appended to the files."""

    def __init__(
        self,
        *arguments: str | Path,
        output: Path,
        errors: Path,
        variables: Mapping[str, str],
        session: bool = False,
        real: bool = False,
    ):
        """Start the command in the working directory, with the environment `variables`. session: in a new session."""
        self.args = ["dppo-megatron", *map(str, arguments)]
        self._process = fork_server().Process(
            target=_main, args=(self.args, dict(variables), os.getcwd(), str(output), str(errors), session, real)
        )
        self._process.start()
        self.pid: int = self._process.pid
        atexit.register(self.kill)  # if a test fails, the interpreter would wait for the command

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _main(
    arguments: list[str], variables: dict[str, str], directory: str, output: str, errors: str, session: bool, real: bool
) -> None:
    if session:
        os.setsid()
    os.chdir(directory)
    from dppo_megatron.common import process

    if not real:
        process.Child.__init__ = _start_child
    _run(arguments, variables, output, errors)


def _run(arguments: list[str], variables: Mapping[str, str], output: str, errors: str) -> None:
    variables = dict(variables)
    os.environ.clear()
    os.environ.update(variables)
    for path, descriptor in ((output, 1), (errors, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable()  # SIGABRT prints the stacks of all threads
    sys.argv = arguments
    from dppo_megatron.cli import main

    try:
        main()
    finally:
        atexit._run_exitfuncs()  # a `multiprocessing` fork would skip them


def _start_child(
    child: Any, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None, lock: Any = None
) -> None:
    """Replace `Child.__init__`: start a fork of this process."""
    assert command[:3] == [sys.executable, *MODULE], command
    log.parent.mkdir(parents=True, exist_ok=True)
    kept = () if lock is None else (lock.descriptor,)
    child.name, child.log = name, log
    child._process = _Fork(list(command), {**os.environ, **(env or {})}, str(log), kept)


class _Fork:
    """Represents a forked process with the methods of `subprocess.Popen` that `Child` uses."""

    def __init__(self, command: list[str], variables: dict[str, str], log: str, kept: tuple[int, ...]):
        fork: Any = multiprocessing.get_context("fork")
        self._process = fork.Process(target=_child, args=(command, variables, log, kept, os.getpid()))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _child(command: list[str], variables: dict[str, str], log: str, kept: tuple[int, ...], parent: int) -> None:
    from dppo_megatron.common.process import end_with_parent

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_with_parent(parent)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, nothing, *kept}:
        os.dup2(nothing, descriptor)  # not closed: inherited objects may close these descriptors later
    _show(command)
    logging.root.handlers.clear()
    _run(["dppo-megatron", *command[3:]], variables, log, log)


def _show(command: list[str]) -> None:
    """Overwrite the fork server's visible command line with `command`, because tests find processes by it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(fields[index]) for index in (ARG_START, ARG_START + 1))
    text = b"\0".join(map(os.fsencode, command))
    assert len(text) < end - start
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
