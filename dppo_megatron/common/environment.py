"""Choose the environment of child processes, and set environment variables in this process temporarily."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Variables that a child would obey and does not inherit: an outer program's ranks, and Python options, except for
# paths, files and debugging. All other variables pass: NCCL, UCX, CUDA, library paths, caches.
_OF_OTHERS = (
    r"(\w+_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|ROLE_NAME|TORCHELASTIC_\w+|PYTHON(?!(PATH|HOME|NOUSERSITE|USERBASE"
    r"|PYCACHEPREFIX|DONTWRITEBYTECODE|UNBUFFERED|HASHSEED|FAULTHANDLER|UTF8|MALLOC|TRACEMALLOC|ASYNCIODEBUG)$)\w*"
)
# Servers get these from `server_environment` and `engine.env` only. VLLM_PORT is also a Kubernetes variable.
_OF_SERVERS = r"(VLLM|SGL(ANG)?|DPPO)_(?!\w*(CACHE(_DIR|_ROOT)?|LOGGING_\w+|NCCL_\w+_PATH)$)\w*|PYTORCH_\w*ALLOC_CONF"
# libgomp spins for tens of microseconds with this count, longer than most pauses between two operators in a small
# model. This saves an eighth of the sampling time at 20 M parameters. Three times this count takes the cores from other
# processes.
SPINS = 3000
_LONGEST_TMPDIR = 64  # bytes; a socket's path has at most 107, and vLLM and multiprocessing append up to 37


def cpu_threads(sharing: int = 0, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the OpenMP variables for a child process that are not in `environment`.

    Threads without work sleep. If they spin next to a busy process, the same work takes up to 4 times as long.
    sharing: the number of processes, this child included, that compute at the same time on this process's CPUs; each
    gets an equal part of the threads. With 0, the child chooses the number of threads.
    """
    variables = {"OMP_WAIT_POLICY": "PASSIVE"}
    if sharing:
        variables["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // sharing))
    if sharing == 1 and "OMP_WAIT_POLICY" not in environment:
        variables["GOMP_SPINCOUNT"] = str(SPINS)
    return {name: value for name, value in variables.items() if name not in environment}


def child_environment(
    added: Mapping[str, str] | None = None, *, server: bool = False, peer: str = "", sharing: int = 0
) -> dict[str, str]:
    """Return a child's environment: this process's environment without variables meant for others, and `added`.

    server: the child is an inference server, or starts with a server's interpreter.
    peer: host of our server that foreign code in the child calls. Requests to the peer and to loopback use no proxy.
    sharing: as in `cpu_threads`.
    """
    dropped = f"{_OF_OTHERS}|{_OF_SERVERS}" if server else _OF_OTHERS
    variables = {name: value for name, value in os.environ.items() if not re.fullmatch(dropped, name)}
    # Clients expect different forms of IPv6 in no_proxy. With a SOCKS proxy, httpx opens no client without socksio.
    unusable = {"(http|all)_proxy=": ":" in peer, "(https?|all)_proxy=socks": peer and find_spec("socksio") is None}
    for pattern in (pattern for pattern, applies in unusable.items() if applies):
        variables = {n: value for n, value in variables.items() if not re.match(pattern, f"{n}={value}".lower())}
    no_proxy = [value.strip() for name, value in variables.items() if name.lower() == "no_proxy"]
    direct = "*" if "*" in no_proxy else ",".join(filter(None, dict.fromkeys((*no_proxy, *LOOPBACK, peer))))
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_TMPDIR:
        variables["TMPDIR"] = next(path for path in ("/tmp", "/var/tmp", "/dev/shm", ".") if os.access(path, os.W_OK))
    return variables | cpu_threads(sharing) | {"no_proxy": direct, "NO_PROXY": direct, **(added or {})}


@contextmanager
def environment(**changes: str) -> Iterator[None]:
    """Set the variables inside the context; restore their previous values, or their absence, afterwards."""
    previous = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
