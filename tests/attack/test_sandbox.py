"""Programs that try to take more than their share of the sandbox, or to outlive their call, as root and another user.

The share is `processes` times `memory_mb` and twice `files_mb`, kernel memory included.
"""

import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dppo_megatron.common.retry import wait_until
from tests.attack import cases, generator
from tests.attack.sandbox_user import REPOSITORY

pytestmark = pytest.mark.slow
CASES = cases(6)
OTHER = 4321  # a user that owns nothing
LIMITS = {"cpu_s": 3, "wall_s": 20.0, "memory_mb": 96, "processes": 4, "files_mb": 8, "files": 8, "output": 2000}
SHARE = (96 * 4 + 8 * 2) << 20
OWN = 24 << 20  # the two processes that hold the sandbox, and the kernel's memory for them
ANSWER_S = 60.0

# Each holds as much as it can of one kind, and counts the bytes that no limit of a process counts.
TAKE = """
import ctypes, mmap, os, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
held, kept = 0, []
def each(attempt, size, most=100000):
    "Repeats what takes `size` bytes, until it is refused or a gigabyte is held."
    global held
    for number in range(most):
        try:
            got = attempt(number)
        except (OSError, MemoryError, AttributeError, ValueError):
            break
        if got == -1 or held > 1 << 30:
            break
        kept.append(got)
        held += size
"""
TAKERS = {
    "socket buffers": """
        def fill(number):
            ends = socket.socketpair()
            for end in ends:
                try:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
                except OSError:
                    pass
                end.setblocking(False)
                try:
                    while sent := end.send(bytes(1 << 20)):
                        globals().update(held=held + sent)
                except OSError:
                    pass
            return ends
        each(fill, 0)
    """,
    "parts of huge pages": """
        libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_size_t] * 4 + [ctypes.c_long] * 2
        libc.munmap.argtypes = [ctypes.c_size_t] * 2
        def fill(number):
            start = libc.mmap(0, 4 << 20, 3, 0x22, -1, 0)
            if start == 2**64 - 1:
                return -1
            whole = (start + (2 << 20) - 1) >> 21 << 21
            libc.madvise(ctypes.c_void_p(whole), ctypes.c_size_t(2 << 20), 14)
            ctypes.memset(whole, 1, 1)
            libc.munmap(start, whole - start)
            libc.munmap(whole + 4096, start + (4 << 20) - whole - 4096)
        each(fill, 0, 400)
    """,
    "mappings": """
        pages = mmap.mmap(-1, 40 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        libc.mprotect.argtypes = [ctypes.c_size_t] * 2 + [ctypes.c_int]
        def fill(number):
            ctypes.memset(start + 8192 * number, 1, 8192)
            return libc.mprotect(start + 8192 * number, 4096, 1)
        each(fill, 0, 40 << 7)
    """,
    "files without a name": """
        def fill(number):
            file = os.open("f", os.O_CREAT | os.O_RDWR)
            os.unlink("f")
            if os.write(file, bytes(1 << 20)) < 1 << 20:
                return -1
            return file
        each(fill, 0)
    """,
    "memory": "each(lambda n: bytes(1 << 20), 0)",
    "shared pages": """
        def fill(number):
            pages = mmap.mmap(-1, 1 << 20)
            pages.write(bytes(1 << 20))
            return pages
        each(fill, 0)
    """,
}
# Where the taker runs. Each process of the program takes as much again.
PLACES = {
    "the program": "take()",
    "a thread": "thread = threading.Thread(target=take); thread.start(); thread.join()",
    "children": """
        for _ in range(3):
            if os.fork() == 0:
                take(); stay()
        take()
    """,
    "its own session": """
        if os.fork() == 0:
            os.setsid(); take(); stay()
    """,
    "a grandchild": """
        if os.fork() == 0:
            if os.fork() == 0:
                os.setsid(); take(); stay()
            os._exit(0)
    """,
    "without a signal at its parent's end": """
        libc.prctl(1, 0, 0, 0, 0)
        if os.fork() == 0:
            libc.prctl(1, 0, 0, 0, 0); os.setsid(); take(); stay()
        take()
    """,
    "a thread that becomes the program": """
        if "again" not in sys.argv:
            thread = threading.Thread(target=os.execv, args=(sys.executable, [sys.executable, *sys.argv, "again"]))
            thread.start(); thread.join()
        take()
    """,
}
# How it ends, and the tool's answer.
ENDS = {
    "at once": ("", ""),
    "a code": ("os._exit(137)", "[exit code 137]"),
    "killed": ("os.kill(os.getpid(), 9)", "[killed by SIGKILL]"),
    "an error of the kernel": ("ctypes.string_at(0)", "[killed by SIGSEGV]"),
    "never": ("stay()", "[ended after 3 s]"),
    "all signals": ("os.kill(0, 15); os.kill(-1, 9); stay()", "[killed by SIGTERM]"),
    "stopped": ("os.kill(os.getpid(), 19)", "[ended after 3 s]"),
}


def program(taker: str, place: str, end: str) -> str:
    def inside(text: str) -> str:
        return textwrap.indent(textwrap.dedent(text).strip("\n"), "    ")

    return (
        f"{TAKE}\ndef take():\n    global held\n{inside(TAKERS[taker])}\n    print('held', held, flush=True)\n"
        "def stay():\n    libc.setsid()\n    while True: time.sleep(9)\n"
        f"{textwrap.dedent(PLACES[place])}\ntime.sleep(0.3)\n{ENDS[end][0]}\n"
    )


@dataclasses.dataclass
class User:
    """Programs run as one user, in a process of their own."""

    process: subprocess.Popen

    def send(self, code: str, **limits: Any) -> None:
        self.process.stdin.write(json.dumps({"code": code, "limits": {**LIMITS, **limits}}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> dict:
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_S)
        assert ready, f"no answer in {ANSWER_S} s"
        return json.loads(self.process.stdout.readline())

    def run(self, code: str, **limits: Any) -> dict:
        self.send(code, **limits)
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for group in Path("/sys/fs/cgroup/memory").glob(f"**/attack-{self.process.pid}"):
            group.rmdir()

    def attack(self, taker: str, place: str, end: str) -> str:
        """Return the problem of how this attack ended; empty if there is none."""
        limits = {"wall_s": 3.0} if "ended after 3 s" in ENDS[end][1] else {}
        answer = self.run(program(taker, place, end), **limits)
        said = answer.get("said", "")
        held = sum(int(line.split()[1]) for line in said.splitlines() if line.startswith("held "))
        wrong = [f"processes {answer['left']} are left"] if answer["left"] else []
        wrong += [f"it holds {held >> 20} MB"] if held > SHARE // 4 else []
        for name, most in (("peak", SHARE + OWN), ("kept", OWN)):
            if answer[name] is not None and answer[name] > most:
                wrong.append(f"{name}: {answer[name] >> 20} MB")
        if "failed" in answer or "Traceback" in said or not said.rstrip().endswith(ENDS[end][1]):
            wrong.append(f"the tool says {answer.get('failed') or said[-500:]!r}")
        return "; ".join(wrong)


def user(number: int) -> User:
    command = [sys.executable, "-B", "-m", "tests.attack.sandbox_user", str(number)]
    return User(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY))


@pytest.fixture(scope="module", params=["root", "another user"])
def who(request) -> Iterator[User]:
    if request.param == "root" and os.geteuid():
        pytest.skip("not root")
    started = user(0 if request.param == "root" else os.geteuid() or OTHER)
    try:
        started.run("pass")  # reads Python's files
        yield started
    finally:
        started.end()


@pytest.mark.parametrize("taker", TAKERS)
def test_no_kind_of_memory_exceeds_the_share(who, taker):
    assert not who.attack(taker, "the program", "at once")
    assert not who.attack(taker, "children", "at once")


@pytest.mark.parametrize("place", PLACES)
def test_no_process_outlives_its_call(who, place):
    assert not who.attack("memory", place, "never" if "becomes" in place or "signal" in place else "at once")


@pytest.mark.parametrize("end", ENDS)
def test_the_answer_tells_how_the_program_ended(who, end):
    assert not who.attack("files without a name", "the program", end)


def test_attacks_drawn_at_random(who):
    failures = {}
    for number in range(CASES):
        draw = generator("sandbox", number)
        case = [draw.choice(list(kinds)) for kinds in (TAKERS, PLACES, ENDS)]
        if wrong := who.attack(*case):
            failures[number, *case] = wrong
    assert not failures, f"{len(failures)} cases: {dict(list(failures.items())[:8])}"


# System calls of x86_64 that the filter excludes, so that no limit has to count what they take, and their arguments.
EXCLUDED: dict[str, tuple[int, ...]] = {
    "semget": (64,), "msgget": (68,), "shmget": (29,), "mq_open": (240,), "memfd_create": (319,),
    "memfd_secret": (447,),
    "vmsplice": (278,), "inotify_init": (253,), "inotify_init1": (294,), "io_setup": (206,), "io_uring_setup": (425,),
    "add_key": (248,), "keyctl": (250,), "mount": (165,), "unshare": (272,), "setns": (308,), "ptrace": (101,),
    "sendmsg, which passes descriptors": (46,), "setsockopt": (54,), "F_SETLK": (72, 1, 6), "F_OFD_SETLK": (72, 1, 37),
    "F_SETLEASE": (72, 1, 1024), "F_SETPIPE_SZ": (72, 1, 1031, 1 << 20),
}  # fmt: skip


def test_calls_that_no_limit_counts_are_excluded(who):
    code = f"""
        import ctypes, errno
        libc = ctypes.CDLL(None, use_errno=True)
        for name, (number, *arguments) in {EXCLUDED}.items():
            found = libc.syscall(number, *arguments, *[0] * (6 - len(arguments))), ctypes.get_errno()
            if found != (-1, errno.EPERM if arguments else errno.ENOSYS):
                print(name, *found)
    """
    assert who.run(textwrap.dedent(code))["said"] == "[it printed nothing]"


def test_the_sandbox_has_only_pairs_of_unix_sockets(who):
    code = """
        import socket
        for make in (socket.socket, socket.socketpair):
            for family in range(50):
                for kind in (1, 2, 3, 4, 5, 10):
                    try:
                        make(family, kind)
                        print(make.__name__, family, kind)
                    except OSError:
                        pass
    """
    assert who.run(textwrap.dedent(code))["said"] == "".join(f"socketpair 1 {kind}\n" for kind in (1, 2, 3, 5))


def test_files_of_other_directories_are_not_there(who):
    with tempfile.NamedTemporaryFile(dir="/tmp") as marker:
        names = {part for path in (sys.prefix, sys.base_prefix) for part in Path(path).parts}
        code = f"import os; print(os.path.exists({marker.name!r}), *os.listdir('/tmp'))"
        said = who.run(code)["said"].split()
    assert said[0] == "False"
    assert not {*said[1:]} - names


def test_a_long_program_runs(who):
    answer = who.run(f"# {'x' * (12 << 20)}\nimport os; print('done', os.listdir())")
    assert answer["said"] == "done []\n"


@pytest.mark.parametrize("victim", ["caller", "supervisor"])
def test_nothing_is_left_of_a_call_that_is_killed(victim):
    """Without its caller the sandbox ends; without its supervisor, the call fails."""

    def directories() -> set[str]:
        with os.scandir(tempfile.gettempdir()) as found:
            return {entry.name for entry in found if entry.name.startswith("sandbox-") and entry.stat().st_uid == OTHER}

    started, before = user(os.geteuid() or OTHER), directories()
    try:
        started.run("pass", wall_s=60.0)
        started.send(program("memory", "without a signal at its parent's end", "never"), wall_s=60.0)
        caller = psutil.Process(started.process.pid)
        assert wait_until(lambda: len(caller.children(recursive=True)) >= 3, ANSWER_S, 0.05)
        time.sleep(0.5)
        found = caller.children(recursive=True)
        (caller if victim == "caller" else found[0]).kill()
        if victim == "supervisor":
            assert "killed" in started.answer()["failed"]
        assert wait_until(lambda: not any(p.is_running() and p.status() != "zombie" for p in found), 10, 0.05), found
        assert not directories() - before
    finally:
        started.end()
