"""Run Python programs isolated from the machine's files, network and processes, with limited memory and time.

Kernel namespaces isolate them (`sandbox.py`), without root and without a package. They stop a policy's attempts, but
not a program that breaks the kernel itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dppo_megatron.common.process import exit_reason
from dppo_megatron.errors import ExpectedError

from .interface import EnvironmentFailed
from .sandbox import PLACE

_SANDBOX = Path(__file__).with_name("sandbox.py")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_DESCRIPTORS = 64  # limit of each process
_END_S = 30.0  # time for the kernel to end a program's processes
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
# Prints the limits that are not enforced.
_PROBE = """
import os, resource, socket, time
def holds(name, attempt):
    try:
        attempt()
    except (OSError, MemoryError):
        return
    print(name)
def write(path, size):
    with open(path, "wb") as file:
        for _ in range(size):
            file.write(bytes(1 << 20))
def fork():
    for _ in range({processes}):
        if os.fork() == 0:
            time.sleep(60)
holds("network", lambda: socket.create_connection(("127.0.0.1", {port}), 1))
holds("system calls", lambda: os.memfd_create("held"))
holds("reading files", lambda: os.stat({canary!r}))
for place in {writable!r}:
    holds("writing files", lambda: write(place + "/planted", 0))
holds("files_mb", lambda: write("big", {files_mb} + 1))
holds("memory_mb", lambda: bytearray({memory_mb} << 20))
holds("processes", fork)
print("tried")
"""


class SandboxError(ExpectedError):
    """A limit or a path in `readable` is invalid, or a limit cannot be enforced on this machine."""


@dataclass(frozen=True)
class Limits:
    """Limits one program. Memory is at most `processes` x `memory_mb`, plus 2 x `files_mb` for files and output."""

    wall_s: float = 10.0
    cpu_s: int = 10  # limit of each process
    memory_mb: int = 512  # limit of each process, including the kernel's memory for it
    processes: int = 1  # number of processes and threads, including the program itself
    files_mb: int = 16  # total size of the files in the working directory, an in-memory file system
    files: int = 256  # number of files
    output: int = 8192  # characters of the program's output in the answer
    readable: tuple[str, ...] = ()  # directories and files on the machine, in addition to Python and its packages

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "readable" and not (type(value) in (int, type(getattr(Limits, name))) and value > 0):
                raise SandboxError(f"{name} = {value!r}: must be a positive integer, a limit of the Python tool")
        object.__setattr__(self, "readable", tuple(self.readable))
        for path in self.readable:
            if not os.path.isabs(path) or not os.path.exists(path):
                raise SandboxError(f"readable = {path!r}: not an existing absolute path; correct or remove it")


def python_tool(**limits: Any) -> Callable[[str], str]:
    """Return the tool `python` for an environment's `tools`. `limits` sets fields of `Limits`.

    Tests the isolation and most limits. Raises `SandboxError` if one of them cannot be enforced on this machine.
    """
    tool_limits = Limits(**limits)
    _try_limits(tool_limits)

    def python(code: str) -> str:
        """Run a Python program and return its printed output. Each program starts in a new, empty directory, without
        network."""
        output, reason = _run(code, tool_limits)
        text = output[: tool_limits.output]
        if len(output) > tool_limits.output:
            text += f"\n[cut after {tool_limits.output} characters]"
        return f"{text}\n[{reason}]".lstrip("\n") if reason else text or "[it printed nothing]"

    return python


class Python:
    """Provides an environment with only this tool. Its settings are `Limits`. `reward:` scores the last turn."""

    def __init__(self, **limits: Any):
        self.tools = [python_tool(**limits)]


@cache
def _try_limits(limits: Limits) -> None:
    with tempfile.NamedTemporaryFile() as canary, socket.create_server(("127.0.0.1", 0)) as server:
        code = _PROBE.format(
            **vars(limits), port=server.getsockname()[1], canary=canary.name, writable=["/", *_directories(limits)]
        )
        try:
            output, reason = _run(code, limits)
        except EnvironmentFailed as error:
            raise SandboxError(
                f"the Python tool's limits cannot be enforced on this machine: {error}. It needs Linux 5.14 with user "
                "namespaces: sysctl user.max_user_namespaces above 0, kernel.unprivileged_userns_clone = 1 and "
                "kernel.apparmor_restrict_unprivileged_userns = 0 where they exist; a container must let it call "
                "unshare and mount (Docker: --security-opt seccomp=unconfined and apparmor=unconfined)"
            ) from None
    *unenforced, last = output.splitlines() or [""]
    if unenforced or last != "tried":
        problem = ", ".join(unenforced) or f"the test program printed {output!r} and {reason or 'ended normally'}"
        raise SandboxError(
            f"the Python tool's limits do not work on this machine: {problem}. If Python does not start, give it more "
            "memory_mb, or add its libraries to `readable`"
        )


def _run(code: str, limits: Limits) -> tuple[str, str]:
    """Run a program in a new sandbox; return (output, reason why the program ended, "" after exit code 0).

    Raises `EnvironmentFailed` if no sandbox can be created.
    """
    max_file_bytes = max(limits.files_mb << 20, 4 * limits.output)
    output = os.memfd_create("output")
    read_end, write_end = os.pipe()
    share = limits.processes * limits.memory_mb + 2 * limits.files_mb
    # The kernel's records of a process's mappings take at most an eighth of their size; socket buffers take more than
    # pipes.
    memory, buffers = limits.memory_mb << 20, _DESCRIPTORS * _socket_buffer()
    sockets = 4 * buffers <= memory
    with tempfile.TemporaryDirectory(prefix="sandbox-") as root, os.fdopen(output, "rb") as output_file:
        settings = {
            "code": code, "root": root, "python": sys.executable, "env": _variables(), "files": limits.files,
            "megabytes": limits.files_mb, "memory": share << 20, "sockets": sockets,
            "readable": [*_directories(limits), *_DEVICES],
            "limits": {
                "RLIMIT_AS": memory - memory // 8 - sockets * buffers, "RLIMIT_CPU": limits.cpu_s,
                "RLIMIT_FSIZE": max_file_bytes, "RLIMIT_NPROC": limits.processes, "RLIMIT_NOFILE": _DESCRIPTORS,
                "RLIMIT_SIGPENDING": 64, "RLIMIT_CORE": 0,
            },
        }  # fmt: skip
        with os.fdopen(read_end, "rb") as answer:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SANDBOX), str(os.getpid()), str(write_end)],
                stdin=subprocess.PIPE, stdout=output, stderr=output, pass_fds=[write_end], env=_variables(), cwd="/",
                start_new_session=True,
            )  # fmt: skip
            os.close(write_end)
            timed_out = False
            try:
                process.communicate(json.dumps(settings).encode(), limits.wall_s)
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                _end(process)
            report = json.loads(answer.readline() or '{"failed": "the sandbox was killed"}')
        if "failed" in report and not (timed_out and process.returncode == 0):
            raise EnvironmentFailed("raised", report["failed"])
        output_file.seek(0)
        reason = f"ended after {limits.wall_s:g} s" if timed_out else _ended(report["code"], report["cpu_s"], limits)
        return output_file.read(4 * limits.output + 4).decode(errors="replace"), reason


@cache
def _socket_buffer() -> int:
    """Return the most bytes that the kernel buffers for a socket; a write may exceed SO_SNDBUF by half."""
    with socket.socket(socket.AF_UNIX) as unix_socket:
        return unix_socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) * 3 // 2


def _end(supervisor: subprocess.Popen) -> None:
    """Terminate the supervisor. The supervisor ends all program processes and then itself."""
    supervisor.terminate()
    try:
        supervisor.wait(_END_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()
        raise EnvironmentFailed("raised", f"a program's processes did not end within {_END_S} s") from None


def _ended(code: int, cpu_s: float, limits: Limits) -> str:
    if code == -signal.SIGKILL and cpu_s > 0.9 * limits.cpu_s:
        return "ended at the limit of its time on the CPU"
    return exit_reason(code) if code else ""


def _directories(limits: Limits) -> Sequence[str]:
    parts = (
        f"{prefix}/{part}" for prefix in (sys.base_prefix, sys.prefix) for part in ("bin", "lib", "lib64", "pyvenv.cfg")
    )
    paths = dict.fromkeys((*_LIBRARIES, *parts, *limits.readable))
    return [path for path in paths if os.path.exists(path)]


def _variables() -> dict[str, str]:
    loader_variables = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"HOME": PLACE, "TMPDIR": PLACE, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **threads, **loader_variables}
