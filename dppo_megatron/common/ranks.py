"""Share small values among torch.distributed ranks; an error on one rank is raised on all ranks.

An error on only one rank would leave the other ranks in their next collective until it times out.

The agreements use the store where the ranks met and need no further connections. A gloo group with all ranks would cost
every rank two descriptors for each other rank. Waiting happens in the store, not in a collective, so a wait may last as
long as a rank reports progress (`alive`).
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import pickle
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dppo_megatron.errors import ExpectedError

from .heartbeat import moved

T = TypeVar("T")
_Failure = tuple[type[Exception], str]  # an error's type and text

FIRST_POLL_S, POLL_S = 0.0002, 0.01  # pauses between polls of the store
POLL_S_PER_RANK = 0.0001  # all ranks together poll one process at most ten thousand times a second
LOOK_S = 1.0  # between reports, and between checks of the other ranks' reports
MAX_BYTES = 4 << 20  # bytes per part of a value: torch's store rejects 8 MiB
_NAMES_SHOWN = 8

_SIGNATURE_BYTES = hashlib.sha256().digest_size
_secret = b""  # the run's secret, which signs values

_attempts: WeakKeyDictionary[dist.Store, bytes] = WeakKeyDictionary()  # this attempt's identity, by store
_numbers: WeakKeyDictionary[dist.Store, Iterator[int]] = WeakKeyDictionary()  # counts agreements, by store


def authenticate(secret: str | None) -> None:
    """Accept only values signed with `secret` from now on. Call it on every rank before the first agreement.

    Any process may reach the store, and a foreign pickle can run code.
    """
    global _secret
    _secret = (secret or "").encode()


class RanksForged(ExpectedError, RuntimeError):
    """A value in the store does not come from this run's ranks."""


class RanksTimeout(ExpectedError, TimeoutError):
    """Another rank terminated or exceeded the timeout."""


class Ranks:
    """Connects all ranks in the default process group, or only this process if torch.distributed has not started.

    timeout_s: the longest wait for the other ranks without a progress report. If None, the store sets the timeout.
    place: (store, rank, number of ranks) for ranks that share a store without a process group.

    All methods but `alive` and `wait_for_leader` are collective: all ranks call them in the same order, in one thread.
    The methods transfer pickled objects; `action` names the wait in errors. Each raises `RanksTimeout` if another rank
    terminated or exceeded the timeout. They synchronize processes, never devices.
    """

    def __init__(self, timeout_s: float | None = None, *, place: tuple[dist.Store, int, int] | None = None):
        if place is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            place = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
        self.rank, self.size = 0, 1
        if place is None:
            return
        store, self.rank, self.size = place
        if timeout_s is None:
            timeout_s = store.timeout.total_seconds()  # type: ignore[attr-defined] # torch's stub lacks it
        self._timeout_s = timeout_s
        self._store = dist.PrefixStore("agreements", store)
        self._attempt_store = store
        self._number = _numbers.setdefault(store, itertools.count())
        self._poll_s = max(POLL_S, POLL_S_PER_RANK * self.size)
        self._reported = 0.0

    def from_rank_zero(self, make: Callable[[], T], action: str) -> T:
        """Call `make` on rank 0. Return the result on every rank, or raise the error there, with type and text."""
        if self.size == 1:
            return make()
        outcome, error = _outcome_of(make if self.rank == 0 else lambda: None)
        with self._waiting_for(action):
            key = f"{next(self._number)}"
            if self.rank == 0:
                self._set(key, outcome)
            else:
                self._wait([key], action, lambda: [0])
                outcome = self._take(key, self.size - 1)
        result, failure = outcome
        if failure is not None:
            raise _error_of(*failure) if error is None else error
        return result

    def on_every_rank(self, act: Callable[[], T], action: str) -> list[T]:
        """Run `act` on every rank and return all results in rank order.

        If `act` raises on any rank, every rank raises an error with the first error's type and all failed ranks' texts.
        """
        outcome, error = _outcome_of(act)
        outcomes = self.gather(outcome, action)
        failures = [(rank, *failure) for rank, (_, failure) in enumerate(outcomes) if failure is not None]
        if failures:
            reasons = [f"rank {rank}: {kind.__name__}: {text}" for rank, kind, text in failures]
            raise _error_of(failures[0][1], "\n".join(reasons)) from error
        return [result for result, _ in outcomes]

    def gather(self, mine: T, action: str) -> list[T]:
        """Return every rank's object, in rank order, on every rank."""
        if self.size == 1:
            return [mine]
        with self._waiting_for(action):
            number = next(self._number)
            parts, everyone = [f"{number}/{rank}" for rank in range(self.size)], f"{number}/all"

            def missing() -> list[int]:
                return [rank for rank, part in enumerate(parts) if not self._store.check([part])]

            self._set(parts[self.rank], mine)
            if self.rank == 0:
                self._wait(parts, action, missing)
                gathered = [self._take(part) for part in parts]
                self._set(everyone, gathered)
                return gathered
            self._wait([everyone], action, missing)
            return self._take(everyone, self.size - 1)

    def begin_attempt(self) -> None:
        """Reject values from now on that were signed with the run's secret in an earlier attempt."""
        if self.size == 1:
            return
        mine = os.urandom(16)
        everyone = self.gather(mine, "every rank's part of this attempt's identity")
        if everyone[self.rank] != mine:
            raise RanksForged(f"rank {self.rank}: the store has values of an earlier attempt of this run")
        _attempts[self._attempt_store] = hashlib.sha256(b"".join(everyone)).digest()

    def new_name(self) -> str:
        """Return a new name that is the same on every rank."""
        return f"name-{next(self._number)}" if self.size > 1 else ""

    def wait_for_leader(self, leader: int, name: str, followers: int, action: str) -> None:
        """Return when rank `leader` has called this with the same name; the leader returns at once.

        Only the leader and `followers` other ranks call it.
        """
        if self.size == 1:
            return
        with self._waiting_for(action):
            if self.rank == leader:
                self._set(name, None)
            else:
                self._wait([name], action, lambda: [leader])
                self._take(name, followers)

    def barrier(self, action: str) -> None:
        """Return when every rank has called this."""
        self.gather(None, action)

    def alive(self) -> None:
        """Report that this rank makes progress, so that other ranks keep waiting for it. Not collective.

        Call it any number of times; it reports at most once a second.
        """
        moved()
        if self.size > 1 and time.monotonic() - self._reported > LOOK_S:
            self._store.add("alive", 1)
            self._reported = time.monotonic()

    def _wait(self, keys: list[str], action: str, missing: Callable[[], list[int]]) -> None:
        since = looked = time.monotonic()
        reports, pause = None, FIRST_POLL_S
        while not self._store.check(keys):
            now = time.monotonic()
            late = now - since > self._timeout_s
            if late or now - looked > LOOK_S:
                looked, previous, reports = now, reports, self._store.add("alive", 0)
                if reports != previous:
                    since = now
                elif late:
                    raise self._late(action, f"missing: {_rank_names(missing() or [0])}")
            time.sleep(pause)
            pause = min(2 * pause, self._poll_s)

    def _set(self, key: str, value: Any) -> None:
        data = zlib.compress(pickle.dumps(value), 1)
        data = self._signature(key, data) + data
        parts = range(0, len(data), MAX_BYTES)
        for index, first in enumerate(parts):
            self._store.set(f"{key}/part-{index}", data[first : first + MAX_BYTES])  # type: ignore[arg-type] # bytes too
        self._store.set(key, str(len(parts)))  # last, so that a reader finds all parts

    def _take(self, key: str, readers: int = 1) -> Any:
        """Return the value; the last reader removes it."""
        parts = [f"{key}/part-{index}" for index in range(int(self._store.get(key)))]
        data = b"".join(self._store.get(part) for part in parts)
        if readers == 1 or self._store.add(f"{key}/readers", 1) == readers:
            for store_key in (key, *parts, *([f"{key}/readers"] if readers > 1 else [])):
                self._store.delete_key(store_key)
        signature, data = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(key, data)):
            raise RanksForged(f"rank {self.rank}: the store's value of {key} was not signed with this run's secret")
        return pickle.loads(zlib.decompress(data))

    def _signature(self, key: str, data: bytes) -> bytes:
        attempt = _attempts.get(self._attempt_store, b"")
        return hmac.digest(_secret, key.encode() + b" " + attempt + data, "sha256")

    @contextmanager
    def _waiting_for(self, action: str) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:  # the store's host process has terminated
            raise self._late(action, str(error).splitlines()[0]) from error

    def _late(self, action: str, reason: str) -> RanksTimeout:
        return RanksTimeout(
            f"rank {self.rank} waited {self._timeout_s:g} s for {action}: another rank ended or was too late; see the "
            f"logs of all ranks ({reason})"
        )


def _rank_names(ranks: list[int]) -> str:
    shown = ", ".join(f"rank {rank}" for rank in ranks[:_NAMES_SHOWN])
    return shown if len(ranks) <= _NAMES_SHOWN else f"{shown} and {len(ranks) - _NAMES_SHOWN} more"


def _outcome_of(act: Callable[[], Any]) -> tuple[tuple[Any, _Failure | None], Exception | None]:
    """Return ((result, failure), error) of a call.

    The failure has the error's type, or the nearest base class that other ranks can construct. An error that the other
    ranks cannot construct would leave them waiting, or would lose the text.
    """
    try:
        return (act(), None), None
    except Exception as error:
        kind = next(kind for kind in type(error).__mro__ if _can_be_sent(kind))
        text = f"{error}" if kind is type(error) else f"{type(error).__name__}: {error}"
        return (None, (kind, text)), error


def _can_be_sent(kind: type) -> bool:
    try:
        pickle.dumps(kind)
        return "text" in str(_error_of(kind, "text"))
    except Exception:
        return False


def _error_of(kind: type[Exception], text: str) -> Exception:
    """Return another rank's error with type and text, but without attributes that the type's constructor may set."""
    error = kind.__new__(kind)
    error.args = (text,)
    return error
