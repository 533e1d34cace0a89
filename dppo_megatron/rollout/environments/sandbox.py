"""Set up a sandbox and run one program in it. `python_tool` starts this script.

It imports only the standard library. There are three processes:

- The supervisor creates new namespaces. They show the Python installation, read-only, and an empty directory in memory.
- The supervisor's child is process 1 in the new PID namespace. When it ends, the kernel kills every process there.
- The program is the child of process 1.

The program has no capabilities. A filter admits only listed system calls, so that all program memory counts towards
the limits: no System V objects, message queues, `fcntl` locks or pinned pages. It admits `socketpair` only if the
memory limit has room for the socket buffers.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import select
import signal
import struct
import sys

NOBODY = 65534
PLACE = "/sandbox"  # the only writable directory
PROGRAM = "/program.py"
ENDINGS = (signal.SIGTERM, signal.SIGCHLD)  # the supervisor waits for these
# <sched.h>, <sys/mount.h>, <linux/mount.h>, <sys/prctl.h>, <linux/seccomp.h>
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NOSUID, NODEV, BIND, REC, PRIVATE, MNT_DETACH = 2, 4, 4096, 16384, 1 << 18, 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
PDEATHSIG, DUMPABLE, SECCOMP, NO_NEW_PRIVS, THP_DISABLE = 1, 4, 22, 38, 41
EPERM, ENOSYS = 0x00050001, 0x00050000 | 38  # results of rejected calls; libraries fall back after ENOSYS
KILL, ALLOW = 0x80000000, 0x7FFF0000

MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # audit number; column of the call numbers
CALLS = """
read 0 63  write 1 64  close 3 57  open 2 -  openat 257 56  stat 4 -  fstat 5 80  lstat 6 -  newfstatat 262 79
statx 332 291  lseek 8 62  pread64 17 67  pwrite64 18 68  readv 19 65  writev 20 66  preadv 295 69  pwritev 296 70
access 21 -  faccessat 269 48  faccessat2 439 439  readlink 89 -  readlinkat 267 78  getcwd 79 17  chdir 80 49
fchdir 81 50  getdents 78 -  getdents64 217 61  mkdir 83 -  mkdirat 258 34  rmdir 84 -  unlink 87 -  unlinkat 263 35
rename 82 -  renameat 264 38  renameat2 316 276  link 86 -  linkat 265 37  symlink 88 -  symlinkat 266 36  chmod 90 -
fchmod 91 52  fchmodat 268 53  utime 132 -  utimes 235 -  utimensat 280 88  truncate 76 45  ftruncate 77 46
fallocate 285 47  umask 95 166  fsync 74 82  fdatasync 75 83  flock 73 32  statfs 137 43  fstatfs 138 44
fadvise64 221 223  creat 85 -  close_range 436 436  dup 32 23  dup2 33 -  dup3 292 24  pipe 22 -  pipe2 293 59
poll 7 -  ppoll 271 73  select 23 -  pselect6 270 72  epoll_create 213 -  epoll_create1 291 20  epoll_ctl 233 21
epoll_wait 232 -  epoll_pwait 281 22  eventfd2 290 19  timerfd_create 283 85  timerfd_settime 286 86
timerfd_gettime 287 87  signalfd4 289 74  mprotect 10 226  munmap 11 215  mremap 25 216  brk 12 214  madvise 28 233
msync 26 227  rt_sigaction 13 134  rt_sigprocmask 14 135  rt_sigreturn 15 139  rt_sigpending 127 136
rt_sigtimedwait 128 137  rt_sigsuspend 130 133  sigaltstack 131 132  kill 62 129  tkill 200 130  tgkill 234 131
pause 34 -  alarm 37 -  getitimer 36 102  setitimer 38 103  fork 57 -  vfork 58 -  execve 59 221  exit 60 93
exit_group 231 94  wait4 61 260  waitid 247 95  getpid 39 172  getppid 110 173  gettid 186 178  getpgid 121 155
getpgrp 111 -  setpgid 109 154  getsid 124 156  setsid 112 157  listxattr 194 11  llistxattr 195 12  flistxattr 196 13
getxattr 191 8  lgetxattr 192 9  fgetxattr 193 10  setxattr 188 5  lsetxattr 189 6  fsetxattr 190 7  getuid 102 174
geteuid 107 175  getgid 104 176  getegid 108 177  getgroups 115 158  getresuid 118 148  getresgid 120 150
uname 63 160  sysinfo 99 179  times 100 153  getrusage 98 165  getrlimit 97 163  setrlimit 160 164
getpriority 140 141  setpriority 141 140  getcpu 309 168  sched_yield 24 124  sched_getaffinity 204 123
sched_setaffinity 203 122  sched_getparam 143 121  sched_getscheduler 145 120  sched_get_priority_max 146 125
sched_get_priority_min 147 126  futex 202 98  set_robust_list 273 99  get_robust_list 274 100  set_tid_address 218 96
rseq 334 293  membarrier 324 283  arch_prctl 158 -  restart_syscall 219 128  getrandom 318 278  gettimeofday 96 169
time 201 -  clock_gettime 228 113  clock_getres 229 114  clock_nanosleep 230 115  nanosleep 35 101  sendto 44 206
recvfrom 45 207  shutdown 48 210  getsockname 51 204  getpeername 52 205  getsockopt 55 209  socketpair 53 199
fcntl 72 25  ioctl 16 29  prctl 157 167  prlimit64 302 261  clone 56 220  mmap 9 222  socket 41 198
"""
# System calls that are allowed only for some values of an argument: (argument index, allowed values).
ONLY: dict[str, tuple[int, tuple[int, ...]]] = {
    "socketpair": (0, (1,)),  # AF_UNIX, which asyncio and multiprocessing need
    "fcntl": (1, (0, 1, 2, 3, 4, 1030, 1032)),  # no locks (unlimited memory), larger pipes, leases
    "ioctl": (1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),  # TCGETS, TIOCGWINSZ, FION*, FIO*CLEX
    "prctl": (0, (15, 16)),  # thread names
    "prlimit64": (0, (0,)),  # the caller's limits
    "socket": (0, ()), "setxattr": (0, ()), "lsetxattr": (0, ()), "fsetxattr": (0, ()),
}  # fmt: skip
# System call -> (argument index, forbidden bits): new namespaces; MAP_HUGETLB.
WITHOUT = {"clone": (0, 0x7E020000), "mmap": (3, 0x40000)}
LIBC = ctypes.CDLL(None, use_errno=True)


def call(action: str, function: str, *arguments: object) -> None:
    if getattr(LIBC, function)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")


def own_users(inside: int) -> None:
    """Enter a user namespace in which only this user exists, as `inside`."""
    user, group = os.geteuid(), os.getegid()
    call("user namespace", "unshare", NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {user} 1"), ("gid_map", f"{inside} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    arguments = [None if text is None else text.encode() for text in (source, target, kind)]
    call(f"mounting {source} at {target}", "mount", *arguments, ctypes.c_ulong(flags), options.encode())


def mount_all(root: str, readable: list[str], megabytes: int, files: int, code: str) -> None:
    """Mount the sandbox: the machine's `readable` paths, the program, and an empty writable directory."""
    mount("none", "/", None, REC | PRIVATE)
    text = code.encode("utf-8", "surrogatepass")
    mount("tmpfs", root, "tmpfs", NOSUID | NODEV, f"size={(len(text) >> 20) + 2}m,mode=755")
    with open(root + PROGRAM, "wb") as file:
        file.write(text)
    for path in readable:
        target = root + path
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            open(target, "a").close()
        mount(path, target, None, BIND | REC)
    os.makedirs(root + PLACE, exist_ok=True)
    if not os.path.exists(root + "/tmp"):  # Python may be installed below it
        os.symlink(PLACE, root + "/tmp")
    read_only = struct.pack("QQQQ", READ_ONLY | NOSUID, 0, 0, 0)
    call("read-only", "syscall", MOUNT_SETATTR, AT_FDCWD, root.encode(), AT_RECURSIVE, read_only, len(read_only))
    mount("tmpfs", root + PLACE, "tmpfs", NOSUID | NODEV, f"size={megabytes}m,nr_inodes={files + 1},mode=777")


def leave_root() -> None:
    """Leave root, because process limits do not apply to root.

    In a user namespace without other users, the process stays root there; the limits apply to this root.
    """
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError:
        return
    call("dumpable", "prctl", DUMPABLE, 1, 0, 0, 0)  # otherwise /proc/self belongs to root


def close_calls(sockets: bool) -> None:
    """Install the system call filter. sockets: whether the filter admits `socketpair`."""
    restrictions = ONLY if sockets else {**ONLY, "socketpair": (0, ())}
    audit, column = MACHINES[platform.machine()]
    words = CALLS.split()
    # Each line: operation, jump if true, jump if false, value. 0x20 loads, 0x06 returns.
    program = [(0x20, 0, 0, 4), (0x15, 1, 0, audit), (0x06, 0, 0, KILL), (0x20, 0, 0, 0)]
    for name, number in zip(words[::3], words[1 + column :: 3], strict=True):
        if number == "-":
            continue
        if name in restrictions:
            argument, values = restrictions[name]
            body = [(0x20, 0, 0, 16 + 8 * argument)]
            for value in values:
                body += [(0x15, 0, 1, value), (0x06, 0, 0, ALLOW)]
            body.append((0x06, 0, 0, EPERM))
        elif name in WITHOUT:
            argument, bits = WITHOUT[name]
            body = [(0x20, 0, 0, 16 + 8 * argument), (0x45, 0, 1, bits), (0x06, 0, 0, EPERM), (0x06, 0, 0, ALLOW)]
        else:
            body = [(0x06, 0, 0, ALLOW)]
        program += [(0x15, 0, len(body), int(number)), *body]
    program.append((0x06, 0, 0, ENOSYS))  # rejects all others, and x32 calls: their numbers differ
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(filters))
    call("no new privileges", "prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
    call("filter on system calls", "prctl", SECCOMP, 2, ctypes.c_char_p(header), 0, 0)


def report(descriptor: int, **fields: object) -> None:
    os.write(descriptor, json.dumps(fields).encode() + b"\n")


def memory_group(limit_bytes: int) -> str | None:
    """Create a cgroup limited to `limit_bytes`, kernel memory included; return None if this user cannot create it."""
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        group_paths = {controllers: path for _, controllers, path in (line.rstrip("\n").split(":", 2) for line in file)}
        places, limit = ["/sys/fs/cgroup/memory" + group_paths.get("memory", "")], "memory.limit_in_bytes"
        if "memory" not in group_paths:  # in version 2 only a group without processes has child groups
            path = group_paths.get("", "").rstrip("/")
            places = ["/sys/fs/cgroup" + path.rsplit("/", depth)[0] for depth in range(1 + path.count("/"))]
            limit = "memory.max"
        for place in places:
            group = f"{place}/dppo-tool-{os.getpid()}"
            with contextlib.suppress(OSError):
                os.mkdir(group)
                try:
                    with open(f"{group}/{limit}", "r+") as file:
                        file.write(str(limit_bytes))
                    return group
                except OSError:
                    os.rmdir(group)
    return None


def become(request: dict, group: str | None) -> None:
    """Run the program in this process; never returns."""
    os.setsid()  # otherwise its signals to the process group reach the supervisor
    with contextlib.suppress(OSError):
        if group:
            with open(f"{group}/cgroup.procs", "w") as file:
                file.write("0")
    if os.geteuid() == 0:
        leave_root()
    own_users(NOBODY)
    call("no huge pages", "prctl", THP_DISABLE, 1, 0, 0, 0)  # a mapped part would keep the whole huge page
    os.chroot(request["root"])
    os.chdir(PLACE)
    for name, limit in request["limits"].items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    close_calls(request["sockets"])
    os.execve(request["python"], [request["python"], "-I", "-B", PROGRAM], request["env"])


def guard(request: dict, answer: int, supervisor: int, group: str | None) -> None:
    """Act as process 1: end with the program or the supervisor, and report how the program ended. Never returns."""
    call("end with parent", "prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if select.select([supervisor], [], [], 0)[0]:  # the supervisor ended before the call above
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the program cannot send process 1 a signal that has no handler
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
    program = os.fork()
    if program == 0:
        become(request, group)
    pid = 0
    while pid != program:
        pid, status, usage = os.wait4(-1, 0)
    report(answer, code=os.waitstatus_to_exitcode(status), cpu_s=usage.ru_utime + usage.ru_stime)
    os._exit(0)


def main() -> None:
    """Run the supervisor process.

    Arguments: the id of the process that waits for the answer, and the answer's descriptor. Input: the settings from
    `python_tool`. The answer is one line of JSON: how the program ended, or the failure. When this process ends, all
    others have ended.
    """
    caller, answer = int(sys.argv[1]), int(sys.argv[2])
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    call("end with parent", "prctl", PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    os.set_inheritable(answer, False)
    os.umask(0o022)
    try:
        settings = json.load(sys.stdin)
        if platform.machine() not in MACHINES:
            raise OSError(f"no filter on system calls is known for {platform.machine()}")
        if os.geteuid():
            own_users(0)
        call("namespaces of mounts, processes and network", "unshare", NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS)
        mount_all(settings["root"], settings["readable"], settings["megabytes"], settings["files"], settings["code"])
        pidfd = os.pidfd_open(os.getpid())
        group = memory_group(settings["memory"]) if os.getppid() == caller else os._exit(1)
        child = os.fork()
        if child == 0:
            guard(settings, answer, pidfd, group)
    except BaseException as error:
        report(answer, failed=str(error)[:500])
        os._exit(1)
    signal.sigwait(ENDINGS)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    LIBC.umount2(settings["root"].encode(), MNT_DETACH)
    for directory in filter(None, (group, settings["root"])):  # the caller may have been killed
        with contextlib.suppress(OSError):
            os.rmdir(directory)


if __name__ == "__main__":
    main()
