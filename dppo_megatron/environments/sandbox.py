"""The inside of `python_tool`: a script that walls itself in and becomes the program.

It imports the standard library alone. New namespaces hold nothing of the machine but the Python installation,
read-only, and an empty directory in memory; the program is process 1 of its own, so that whatever it starts ends with
it. It has no capability left, and a filter closes the system calls that would let it hold memory which nobody counts.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys

NOBODY = 65534
PLACE = "/sandbox"  # all that can be written
# <sched.h>, <sys/mount.h>, <linux/mount.h>, <sys/prctl.h>, <linux/seccomp.h>
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NOSUID, NODEV, BIND, REC, PRIVATE = 2, 4, 4096, 16384, 1 << 18
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
PDEATHSIG, DUMPABLE, SECCOMP, NO_NEW_PRIVS = 1, 4, 22, 38
REFUSE, KILL, ALLOW = 0x00050000 | 1, 0x80000000, 0x7FFF0000  # EPERM

# Audit number of the architecture; shmget, memfd_create, add_key, request_key, keyctl, io_uring_setup, userfaultfd,
# bpf, perf_event_open.
CLOSED = {
    "x86_64": (0xC000003E, (29, 319, 248, 249, 250, 425, 323, 321, 298)),
    "aarch64": (0xC00000B7, (194, 279, 217, 218, 219, 425, 282, 280, 241)),
}
LIBC = ctypes.CDLL(None, use_errno=True)


def call(what: str, function: str, *arguments: object) -> None:
    if getattr(LIBC, function)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def own_users(inside: int) -> None:
    """A user namespace in which this user, and nobody else, exists as `inside`."""
    user, group = os.geteuid(), os.getegid()
    call("user namespace", "unshare", NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {user} 1"), ("gid_map", f"{inside} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    given = [None if text is None else text.encode() for text in (source, target, kind)]
    call(f"mounting {source} at {target}", "mount", *given, ctypes.c_ulong(flags), options.encode())


def furnish(root: str, readable: list[str], megabytes: int, files: int) -> None:
    """`readable` of the machine, and an empty directory that can be written."""
    mount("none", "/", None, REC | PRIVATE)
    mount("tmpfs", root, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    for path in readable:
        target = root + path
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            open(target, "a").close()
        mount(path, target, None, BIND | REC)
    os.makedirs(root + PLACE, exist_ok=True)
    read_only = struct.pack("QQQQ", READ_ONLY | NOSUID, 0, 0, 0)
    call("read-only", "syscall", MOUNT_SETATTR, AT_FDCWD, root.encode(), AT_RECURSIVE, read_only, len(read_only))
    mount("tmpfs", root + PLACE, "tmpfs", NOSUID | NODEV, f"size={megabytes}m,nr_inodes={files + 2},mode=777")


def leave_root() -> None:
    """Limits on processes are not for root. A root of a user namespace with no other user is none."""
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError:
        return
    call("dumpable", "prctl", DUMPABLE, 1, 0, 0, 0)  # else /proc/self is root's


def close_calls() -> None:
    machine, numbers = CLOSED[platform.machine()]
    program = [(0x20, 0, 0, 4), (0x15, 1, 0, machine), (0x06, 0, 0, KILL), (0x20, 0, 0, 0)]
    program += [(0x35, 0, 1, 0x40000000), (0x06, 0, 0, KILL)]  # x32, where numbers mean other calls
    for number in numbers:
        program += [(0x15, 0, 1, number), (0x06, 0, 0, REFUSE)]
    program.append((0x06, 0, 0, ALLOW))
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(filters))
    call("no new privileges", "prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
    call("filter on system calls", "prctl", SECCOMP, 2, ctypes.c_char_p(header), 0, 0)


def become(given: dict) -> None:
    """The program, as process 1 of its own. Never returns."""
    if os.geteuid() == 0:
        leave_root()
    own_users(NOBODY)
    call("end with parent", "prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.chroot(given["root"])
    os.chdir(PLACE)
    with open("program.py", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(given["code"])
    for name, most in given["limits"].items():
        resource.setrlimit(getattr(resource, name), (most, most))
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    close_calls()
    os.execve(given["python"], [given["python"], "-I", "-B", f"{PLACE}/program.py"], given["env"])


def main() -> None:
    """Input: what `python_tool` gives. What cannot be done is said to the descriptor in the arguments, and the rest is
    not done."""
    call("end with parent", "prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    told = int(sys.argv[1])
    os.set_inheritable(told, False)
    try:
        given = json.load(sys.stdin)
        if platform.machine() not in CLOSED:
            raise OSError(f"no filter on system calls is known for {platform.machine()}")
        if os.geteuid():
            own_users(0)
        call("namespaces of mounts, processes and network", "unshare", NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS)
        furnish(given["root"], given["readable"], given["megabytes"], given["files"])
        child = os.fork()
        if child == 0:
            become(given)
    except BaseException as error:
        os.write(told, str(error).encode()[:1000])
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
