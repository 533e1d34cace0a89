"""Programs that try to take more than their share of the sandbox, or to outlive their call, as root and another user.

The share is `processes` times `memory_mb` and twice `files_mb`, kernel memory included.
"""

from __future__ import annotations

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
import ctypes, errno, fcntl, mmap, os, signal, socket, struct, sys, threading, time
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
    "semaphores": "each(lambda n: libc.semget(0, 32000, 0o600), 32000 * 64)",
    "message queues": """
        text = struct.pack("l8000s", 1, b"x")
        def fill(number):
            queue = libc.msgget(0, 0o600)
            return queue if queue < 0 else [libc.msgsnd(queue, text, 8000, 0o4000) for _ in range(2)][0]
        each(fill, 16000)
    """,
    "shared memory": """
        def fill(number):
            segment = libc.shmget(0, 8 << 20, 0o600)
            libc.shmat.restype = ctypes.c_void_p
            where = -1 if segment < 0 else libc.shmat(segment, None, 0)
            if segment < 0 or where in (None, 2**64 - 1):
                return -1
            ctypes.memset(where, 1, 8 << 20)
            return libc.shmdt(ctypes.c_void_p(where))
        each(fill, 8 << 20)
    """,
    "queues of POSIX": """
        attributes = struct.pack("8l", 0, 10, 8192, 0, 0, 0, 0, 0)
        each(lambda n: libc.mq_open(b"/q%d" % n, os.O_CREAT | os.O_RDWR, 0o600, attributes), 81920)
    """,
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
    "sockets in sockets": """
        def fill(number):
            ends = socket.socketpair()
            for _ in range(8):
                socket.send_fds(kept[-1][0] if kept else ends[0], [b"x"], [end.fileno() for end in ends])
            ends[0].send(bytes(100000))
            return ends
        each(fill, 100000)
    """,
    "memfd": "each(lambda n: os.write(os.memfd_create('m'), bytes(4 << 20)), 4 << 20)",
    "secret memory": "each(lambda n: libc.syscall(447, 0), 4096)",
    "pages in pipes": """
        def fill(number):
            ends = os.pipe()
            fcntl.fcntl(ends[1], 1031, 1 << 20)  # F_SETPIPE_SZ
            return os.write(ends[1], bytes(1 << 20))
        each(fill, 1 << 20)
    """,
    "pages of others in pipes": """
        def fill(number):
            ends = os.pipe()
            with mmap.mmap(-1, 1 << 16) as pages:
                pages.write(bytes(1 << 16))
                piece = (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.c_char.from_buffer(pages)), 1 << 16)
                return libc.vmsplice(ends[1], piece, 1, 0)
        each(fill, 1 << 16)
    """,
    "file locks": """
        def fill(number):
            fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * number)
        with open("locked", "w") as file:
            each(fill, 200, 5000)
    """,
    "a file system": """
        libc.unshare(0x10020000)
        os.makedirs("more", exist_ok=True)
        def fill(number):
            if libc.mount(b"tmpfs", b"more", b"tmpfs", 0, b"size=1g"):
                return -1
            return open(f"more/{number}", "wb").write(bytes(4 << 20))
        each(fill, 4 << 20)
    """,
    "watches": """
        watch = libc.inotify_init()
        each(lambda n: -1 if watch < 0 else libc.inotify_add_watch(watch, os.fsencode(sys.path[0]), 2), 1000, 5)
    """,
    "requests": """
        context = ctypes.c_long()
        each(lambda n: -1 if libc.syscall(206, 1000, ctypes.byref(context)) else 0, 64000, 50)
    """,
    "keys": "each(lambda n: libc.syscall(248, b'user', b'k%d' % n, bytes(16000), 16000, -1), 16000)",
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


def test_codes_and_signals_are_those_of_the_program(who):
    draw = generator("codes")
    for code in (137, 255, *draw.sample(range(1, 255), 3)):
        assert who.run(f"import os; os._exit({code})")["said"] == f"[exit code {code}]"
    assert who.run("while True: pass", wall_s=20.0, cpu_s=1)["said"] == "[ended at the limit of its time on the CPU]"


def test_no_socket_of_any_family_can_be_made(who):
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
        deadline = time.monotonic() + ANSWER_S
        while len(found := caller.children(recursive=True)) < 3:
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        time.sleep(0.5)
        found = caller.children(recursive=True)
        (caller if victim == "caller" else found[0]).kill()
        if victim == "supervisor":
            assert "killed" in started.answer()["failed"]
        deadline = time.monotonic() + 10
        while alive := [process for process in found if process.is_running() and process.status() != "zombie"]:
            assert time.monotonic() < deadline, alive
            time.sleep(0.05)
        assert not directories() - before
    finally:
        started.end()
