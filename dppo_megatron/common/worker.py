"""Run foreign code in a separate process that answers one request at a time. Every reply is validated."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import resource
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil
from pydantic import ValidationError
from typing_extensions import TypedDict

from .channel import LARGEST_REPLY, TOKEN_BYTES, InvalidReply, WorkerChannel
from .deadline import Deadline
from .environment import child_environment
from .files import adapter
from .process import end_with_parent, exit_reason

_START_S = 300.0  # longest wait for the imports of foreign code, on a slow file system
_EXIT_S = 10.0
# The paths come first, so that the worker finds this package, and the user's, where this process finds them.
_PROGRAM = """import json, sys
sys.path[:] = json.loads(sys.argv[2])
from importlib import import_module
from dppo_megatron.common.worker import serve
serve(int(sys.argv[1]), import_module(sys.argv[3]).load)"""

Answer = Callable[[bytes], list[Any] | bytes]
"""Returns the parts of the reply to a pickled request, or bytes that are sent unchanged. It raises nothing."""


class WorkerError(Exception):
    """The worker gave no reply and must be replaced; the message gives the reason."""


class WorkerTimeout(WorkerError):
    """The worker gave no reply in time."""


class Worker:
    """Runs foreign code in a process that has a separate session and answers one request at a time.

    Call `load` first. After a `WorkerError` the worker is unusable. Call `end` in any case.
    """

    def __init__(
        self, module: str, hello: dict[str, Any], subject: str, largest: int = LARGEST_REPLY, **environment: Any
    ):
        """Start the process.

        module: the module with the function `load` for `serve`. hello: the argument of `load`.
        subject: names the foreign code in errors. largest: most bytes in a reply.
        environment: arguments of `child_environment`.
        """
        self._hello = hello
        self._subject = subject
        self._largest = largest
        self._requests = 0
        self._ended = False
        token = secrets.token_bytes(TOKEN_BYTES)
        ours, theirs = socket.socketpair()
        self._channel = WorkerChannel(ours, token)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), json.dumps(sys.path), module],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=child_environment(**environment),
                start_new_session=True,  # Ctrl-C does not reach it, and `end` reaches its children
            )
        except OSError as error:
            ours.close()
            raise WorkerError(f"cannot start a process for {subject}s: {error.strerror}") from None
        finally:
            theirs.close()
        ours.sendall(token)  # 16 bytes never block

    def load(self) -> str | None:
        """Wait until the foreign code is imported; return why it cannot be, or None. Raises `WorkerError`."""
        hello = pickle.dumps({**self._hello, "parent": os.getpid()})
        reply = self._exchange(hello, _START_S, f"for the {self._subject}s to be imported")
        return checked(_Loaded, reply)["error"]

    def ask(self, request: tuple[Any, ...], timeout_s: float, action: str, kind: Any) -> Any:
        """Return the reply's parts, or the reply's bytes, as a value of type `kind`; `action` names the wait in errors.

        Raises `WorkerError`, or the request's pickling error, after which the worker stays usable.
        """
        return checked(kind, self._exchange(pickle.dumps(request), timeout_s, action).get("parts"))

    @property
    def fresh(self) -> bool:
        """Return whether the worker has had no request since `load`, so no other sample can have affected it."""
        return self._requests <= 1

    @property
    def usable(self) -> bool:
        """Return whether the worker is running and has sent no unrequested bytes."""
        return self._process.poll() is None and self._channel.quiet

    def end(self) -> None:
        """Kill the worker and all processes in its session, which may outlive the worker. Further calls do nothing."""
        if not self._ended:
            self._ended = True
            with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_S)
        self._channel.close()

    def _exchange(self, request: bytes, timeout_s: float, wait: str) -> dict[str, Any]:
        number, self._requests = self._requests, self._requests + 1
        in_progress = False
        try:
            self._channel.send(request, Deadline(timeout_s))
            # Code for an earlier sample may still run in the worker and delay the request.
            in_progress = bool(self._channel.receive_reply(Deadline(timeout_s), number, self._largest).get("begun"))
            reply = self._channel.receive_reply(Deadline(timeout_s), number, self._largest)
            if reply.get("bytes"):
                reply["parts"] = self._channel.receive(Deadline(timeout_s), self._largest)
            return reply
        except TimeoutError:
            if in_progress:
                raise WorkerTimeout(f"waited {timeout_s:g} s {wait}") from None
            raise WorkerError(f"the {self._subject}'s process did not accept a request in {timeout_s:g} s") from None
        except InvalidReply as error:
            raise WorkerError(f"the {self._subject} wrote to the result channel: {error}") from None
        except (EOFError, OSError):
            raise WorkerError(f"the {self._subject}'s process {self._how_it_ended()}") from None

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(1)
            return "took too long" if code == -signal.SIGPROF else f"ended ({exit_reason(code)})"
        except subprocess.TimeoutExpired:
            return "closed the channel of the results"


class _Loaded(TypedDict):
    error: str | None


def checked(kind: Any, value: Any) -> Any:
    """Return a value that foreign code may have written, if it is of type `kind`. Raises `WorkerError` otherwise."""
    try:
        return adapter(kind).validate_python(value, strict=True)
    except ValidationError:
        raise WorkerError("its process sent a reply of a wrong form") from None


def confine(memory: int) -> None:
    """Limit this process to `memory` more bytes than it has now. A crash writes no core file and no text.

    `signal.setitimer(signal.ITIMER_PROF, seconds)` limits the CPU time, because the signal terminates the process.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # RLIMIT_AS would count mapped files too.
    limit_bytes = psutil.Process().memory_info().data + memory
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)


def serve(descriptor: int, load: Callable[[dict[str, Any]], tuple[str | None, Answer]]) -> None:
    """Run the worker: load the code that the hello names, then answer requests until the channel closes.

    load: takes the hello and returns (why the code cannot be loaded, the function that answers).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # otherwise asyncio.run would leave another handler installed
    end, pid = socket.socket(fileno=descriptor), os.getpid()
    channel = WorkerChannel(end, end.recv(TOKEN_BYTES, socket.MSG_WAITALL))
    try:
        hello = pickle.loads(_request(channel, 0))
        end_with_parent(hello["parent"], signal.SIGKILL)  # foreign code may ignore other signals
        problem, answer = load(hello)
        parts: list[Any] | bytes = []
        reply: dict[str, Any] = {"error": problem}
        for number in itertools.count():
            if os.getpid() != pid:  # foreign code forked, and this process is the child
                os._exit(0)
            signal.setitimer(signal.ITIMER_REAL, 0)  # a remaining alarm would terminate the next sample
            _open_streams()
            _reply(channel, number, reply)
            if isinstance(parts, bytes):
                channel.send(parts)
            parts = answer(_request(channel, number + 1))
            reply = {"bytes": True} if isinstance(parts, bytes) else {"parts": parts}
    except (EOFError, OSError):  # the pool or foreign code closed the channel
        os._exit(0)


def _open_streams() -> None:
    """Reopen stdout and stderr if a sample closed them, so that the next sample can print."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
        try:
            getattr(sys, name).flush()  # unwritten text would fail at the next close
        except Exception:
            setattr(sys, name, os.fdopen(descriptor, "w", errors="backslashreplace", closefd=False))


def _request(channel: WorkerChannel, number: int) -> bytes:
    request = channel.receive()
    _reply(channel, number, {"begun": True})
    return request


def _reply(channel: WorkerChannel, number: int, reply: dict[str, Any]) -> None:
    channel.send(json.dumps({"number": number, **reply}).encode())
