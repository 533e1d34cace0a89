"""Commands of `dppo-megatron` as forks of a process that has imported what they import: five seconds less for each.

Of the command alone: what it starts itself (ranks, orchestrator, engines) it starts as it always does.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.ranks import fork_server


class Command:
    """A running command, with the methods of `subprocess.Popen`. Its output is appended to the files."""

    def __init__(
        self, *arguments: str | Path, output: Path, errors: Path, variables: Mapping[str, str], session: bool = False
    ):
        """session: it leads one of its own. The environment is `variables`, and the directory this process's."""
        self.args = ["dppo-megatron", *map(str, arguments)]
        self._process = fork_server().Process(
            target=_main, args=(self.args, dict(variables), os.getcwd(), str(output), str(errors), session)
        )
        self._process.start()
        self.pid: int = self._process.pid
        atexit.register(self.kill)  # of a test that failed: the interpreter would wait for it

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired`."""
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
    arguments: list[str], variables: dict[str, str], directory: str, output: str, errors: str, session: bool
) -> None:
    if session:
        os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(variables)
    for path, descriptor in ((output, 1), (errors, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable()  # SIGABRT makes it say where its threads are
    sys.argv = arguments
    from dppo_megatron.cli import main

    try:
        main()
    finally:
        atexit._run_exitfuncs()  # a fork of `multiprocessing` ends without
