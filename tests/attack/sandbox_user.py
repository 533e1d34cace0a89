"""A process that runs programs in the sandbox as another user, and measures their memory and processes.

`python -m tests.attack.sandbox_user UID`. Each line of its input is one program: {"code": ..., "limits": {...}}. Each
line of its output has the tool's answer or failure; the processes that were left; and by how many bytes of
memory, kernel memory included, this process and its children grew, at most and afterwards. Where no cgroup can be made
these two are null.
"""

import contextlib
import ctypes
import json
import os
import sys
from pathlib import Path

import psutil

from dppo_megatron.rollout.environments.interface import EnvironmentFailed
from dppo_megatron.rollout.environments.python_tool import python_tool
from dppo_megatron.rollout.environments.sandbox import BIND, NEWNS, PRIVATE, REC, mount

REPOSITORY = Path(__file__).parents[2]
PR_SET_CHILD_SUBREAPER = 36


class Memory:
    """A memory cgroup (version 1, which counts a peak that can be reset) with this process in it."""

    def __init__(self) -> None:
        self._usage = self._peak = -1
        try:
            with open("/proc/self/cgroup") as file:
                (path,) = (line.rstrip("\n").split(":", 2)[2] for line in file if ":memory:" in line)
            self.group = Path(f"/sys/fs/cgroup/memory{path}/attack-{os.getpid()}")
            self.group.mkdir()
            (self.group / "cgroup.procs").write_text("0")
            self._usage = os.open(self.group / "memory.usage_in_bytes", os.O_RDONLY)
            self._peak = os.open(self.group / "memory.max_usage_in_bytes", os.O_RDWR)
        except (OSError, ValueError):
            return

    def start(self) -> None:
        if self._peak >= 0:
            self._before = int(os.pread(self._usage, 64, 0))
            os.write(self._peak, b"0")

    def grown(self) -> tuple[int, int] | tuple[None, None]:
        if self._peak < 0:
            return None, None
        return tuple(int(os.pread(file, 64, 0)) - self._before for file in (self._peak, self._usage))


def show_python() -> None:
    """Let every user read the Python installation and the repository below directories of root's, as below /root."""
    ctypes.CDLL(None).unshare(NEWNS)
    shown = {path: os.open(path, os.O_PATH) for path in dict.fromkeys((sys.base_prefix, sys.prefix, str(REPOSITORY)))}
    above = {parent for path in shown for parent in Path(path).parents if not parent.stat().st_mode & 1}
    mount("none", "/", None, REC | PRIVATE)
    for parent in above:
        if not any(other in parent.parents for other in above):
            mount("tmpfs", str(parent), "tmpfs", 0, "mode=755")
    for path, descriptor in sorted(shown.items()):
        if any(parent in above for parent in Path(path).parents):
            os.makedirs(path, exist_ok=True)
            mount(f"/proc/self/fd/{descriptor}", path, None, BIND | REC)


def main(user: int) -> None:
    memory = Memory()
    if user != os.geteuid():
        show_python()
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # so that what a program leaves is found
    for line in sys.stdin:
        given = json.loads(line)
        run, answer = python_tool(**given["limits"]), {}
        memory.start()
        try:
            answer["said"] = run(given["code"])
        except EnvironmentFailed as error:
            answer["failed"] = str(error)
        left = psutil.Process().children(recursive=True)
        answer["left"] = [process.pid for process in left]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, 10)
        answer["peak"], answer["kept"] = memory.grown()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
