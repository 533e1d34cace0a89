"""A process that calls rewards, and the pool's handle of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dppo_megatron.common.process import end_with_parent, exit_reason
from dppo_megatron.types import Prompt

from .channel import TOKEN_BYTES, Channel, Rubbish
from .outcome import LONGEST_DETAIL, Failure, Outcome, attempt, describe, problem_of
from .registry import RewardError, load_reward

Terms = Sequence[tuple[str, Mapping[str, Any]]]  # name and settings of each reward

_START_S = 300.0  # for the imports of a reward, on a slow file system
_EXIT_S = 10.0
# The paths come first: with them the worker finds this package, and the user's, where this process does.
_PROGRAM = """import json, sys
sys.path[:] = json.loads(sys.argv[2])
from dppo_megatron.rewards.worker import main
main(int(sys.argv[1]))"""


class WorkerError(Exception):
    """The worker gave no reply and is of no more use; the text says why."""


class WorkerTimeout(WorkerError):
    """It gave none in time."""


class Worker:
    """A process of its own session that calls rewards. It answers one request at a time.

    `load` comes first. Whatever raises `WorkerError` leaves a worker that is of no more use; `end` it in any case.
    """

    def __init__(self, terms: Terms):
        self._terms = tuple(terms)
        self._requests = 0
        self._ended = False
        token = secrets.token_bytes(TOKEN_BYTES)
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours, token)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is not for it, and what it starts ends with it
            )
        except OSError as error:
            ours.close()
            raise WorkerError(f"no process for verifiers can be started: {error.strerror}") from None
        finally:
            theirs.close()
        ours.sendall(token)  # 16 bytes never wait

    def load(self) -> str | None:
        """Waits until the rewards are imported, and returns why they cannot be. Raises `WorkerError`."""
        hello = pickle.dumps({"terms": self._terms, "parent": os.getpid()})
        match self._exchange(hello, _START_S, "for the rewards to be imported"):
            case {"error": str() | None as error}:
                return error
        raise WorkerError("its process sent a reply that is none")

    def score(self, prompt: Prompt, text: str, terms: Sequence[int], timeout_s: float) -> list[Outcome]:
        """What the given terms make of one response, together within `timeout_s`.

        Raises, besides `WorkerError`, what pickling the prompt raises; the worker stays of use then.
        """
        request = pickle.dumps(("score", prompt, text, tuple(terms)))
        outcomes = [_decode(part) for part in self._parts(request, timeout_s, "for the reward")]
        if len(outcomes) != len(terms):
            raise WorkerError("its process sent a reply that is none")
        return outcomes

    def check(self, term: int, answers: Sequence[str], timeout_s: float) -> list[str | None]:
        """Why a term cannot compare with each of the answers, None where it can. Raises `WorkerError`."""
        request = pickle.dumps(("check", term, tuple(answers)))
        return [problem and str(problem) for problem in self._parts(request, timeout_s, "for answers to be read")]

    @property
    def fresh(self) -> bool:
        """Whether it has been asked for no sample yet, so that no other sample can have harmed it."""
        return self._requests <= 1

    @property
    def usable(self) -> bool:
        """Whether it waits in silence for the next request."""
        return self._process.poll() is None and self._channel.quiet

    def end(self) -> None:
        """Kills it and what it started in its session, which may go on when it has ended. Harmless when repeated."""
        if not self._ended:
            self._ended = True
            with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_S)
        self._channel.close()

    def _parts(self, request: bytes, timeout_s: float, what: str) -> list[Any]:
        match self._exchange(request, timeout_s, what):
            case {"parts": list(parts)}:
                return parts
        raise WorkerError("its process sent a reply that is none")

    def _exchange(self, request: bytes, timeout_s: float, what: str) -> dict[str, Any]:
        number, self._requests = self._requests, self._requests + 1
        begun = False
        try:
            self._channel.send(request, time.monotonic() + timeout_s)
            # Code of an earlier sample may still run in the worker and keep the request from it.
            begun = bool(self._channel.receive_reply(time.monotonic() + timeout_s, number).get("begun"))
            return self._channel.receive_reply(time.monotonic() + timeout_s, number)
        except TimeoutError:
            if begun:
                raise WorkerTimeout(f"waited {timeout_s:g} s {what}") from None
            raise WorkerError(f"the verifier's process took no request for {timeout_s:g} s") from None
        except Rubbish as error:
            raise WorkerError(f"the verifier wrote to the channel of the results: {error}") from None
        except (EOFError, OSError):
            raise WorkerError(f"the verifier's process {self._how_it_ended()}") from None

    def _how_it_ended(self) -> str:
        try:
            return f"ended ({exit_reason(self._process.wait(1))})"
        except subprocess.TimeoutExpired:
            return "closed the channel of the results"


def main(descriptor: int) -> None:
    """The worker: loads the reward and answers requests until the pool closes the channel."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # else asyncio.run would leave a handler of its own behind
    end, own = socket.socket(fileno=descriptor), os.getpid()
    channel = Channel(end, end.recv(TOKEN_BYTES, socket.MSG_WAITALL))
    try:
        hello = pickle.loads(_request(channel, 0))
        if os.getppid() != hello["parent"]:  # it died before end_with_parent
            return
        rewards, problem = [], None
        try:
            rewards = [load_reward(name, settings) for name, settings in hello["terms"]]
        except RewardError as error:
            problem = str(error)
        reply: dict[str, Any] = {"error": problem}
        for number in itertools.count():
            if os.getpid() != own:  # foreign code forked, and this is the child
                os._exit(0)
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that it left behind would end the next sample
            _reply(channel, number, reply)
            request = _request(channel, number + 1)
            reply = {"parts": _answer(rewards, problem, request)}
    except (EOFError, OSError):  # the pool is gone, or foreign code closed the channel
        os._exit(0)


def _request(channel: Channel, number: int) -> bytes:
    request = channel.receive()
    _reply(channel, number, {"begun": True})
    return request


def _reply(channel: Channel, number: int, reply: dict[str, Any]) -> None:
    channel.send(json.dumps({"number": number, **reply}).encode())


def _answer(rewards: Sequence[Any], problem: str | None, request: bytes) -> list[Any]:
    """The parts of a reply. `problem`: why there are no rewards."""
    try:
        kind, *arguments = pickle.loads(request)
    except BaseException as error:
        return [_encode(Failure("raised", describe(error)))]
    if kind == "check":
        term, answers = arguments
        return [problem or problem_of(rewards[term].check_answer, answer) for answer in answers]
    prompt, text, terms = arguments
    if problem is not None:
        return [_encode(Failure("raised", problem[:LONGEST_DETAIL])) for _ in terms]
    return [_encode(attempt(rewards[term], prompt, text)) for term in terms]


def _encode(outcome: Outcome) -> Any:
    return list(outcome) if isinstance(outcome, Failure) else outcome


def _decode(part: Any) -> Outcome:
    match part:
        case float() | None:
            return part
        case [str(reason), str(detail)]:
            return Failure(reason, detail[:LONGEST_DETAIL])
    raise WorkerError("its process sent a reply that is none")
