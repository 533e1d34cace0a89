"""A reward that does as the response demands, by dotted path from test_rewards.py.

`RAISES`, `RETURNS` and `HARMS` name its acts; `exactly` names those returns that are rewards.
"""

import asyncio
import concurrent.futures
import ctypes
import gc
import os
import signal
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction

import numpy as np


class Unpicklable(BaseException):
    def __init__(self, one, two):
        super().__init__(one)

    def __reduce__(self):
        raise SystemExit(3)


class NoText(BaseException):
    def __str__(self):
        raise KeyboardInterrupt

    __repr__ = __str__


class RunsCode(Exception):
    def __reduce__(self):
        return os._exit, (9,)


class Value:
    def __init__(self, value):
        self.value = value

    def __float__(self):
        if isinstance(self.value, type):
            raise self.value
        return self.value

    def __reduce__(self):
        return os._exit, (9,)

    def __repr__(self):
        raise SystemExit(4)


class Endless:
    def __float__(self):
        return float(self)


class Text(str):
    def __float__(self):
        return 1.0


class Awaitable:
    def __await__(self):
        yield from asyncio.sleep(0).__await__()
        return 0.25


def _recursion(depth=0):
    return _recursion(depth + 1)


def _chain():
    try:
        raise ValueError("first")
    except ValueError as error:
        raise ExceptionGroup("\ud800 several \x1b[31m", [error, KeyError("k" * 100_000)]) from error


def _tensor():
    import torch

    return torch.tensor(0.5)


def _tensors():
    import torch

    return torch.ones(3)


RAISES = {
    error.__name__: error
    for error in (
        Exception, BaseException, KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, StopIteration,
        StopAsyncIteration, MemoryError, RecursionError, TimeoutError, OSError, BrokenPipeError, EOFError, ImportError,
        concurrent.futures.CancelledError, AssertionError, NotImplementedError, Warning, LookupError, NoText, RunsCode,
    )
}  # fmt: skip
RAISES |= {"Unpicklable": lambda: Unpicklable(1, 2), "huge text": lambda: ValueError("x" * 10_000_000)}
RETURNS = {
    "int": lambda: 1, "zero": lambda: -0.0, "bool": lambda: True, "float": lambda: 0.5, "tiny": lambda: 1e-300,
    "numpy": lambda: np.float16(0.5), "numpy int": lambda: np.int64(3), "array": lambda: np.array(0.5),
    "decimal": lambda: Decimal("0.5"), "fraction": lambda: Fraction(1, 2), "tensor": _tensor,
    "value": lambda: Value(0.5), "awaitable": Awaitable,
    "nan": lambda: float("nan"), "inf": lambda: float("-inf"), "none": lambda: None, "text": lambda: "1",
    "bytes": lambda: b"1", "text of a class": lambda: Text("1"), "huge int": lambda: 10**400, "1e39": lambda: 1e39,
    "complex": lambda: 1j, "list": lambda: [1.0], "dict": lambda: {"score": 1.0}, "arrays": lambda: np.ones(3),
    "empty": lambda: np.array([]), "tensors": _tensors, "object": object, "class": lambda: int,
    "float raises": lambda: Value(KeyboardInterrupt), "float exits": lambda: Value(SystemExit),
    "float is text": lambda: Value("1"), "endless": Endless, "generator": lambda: (x for x in range(3)),
    "function": lambda: time.sleep, "numpy nan": lambda: np.float64("nan"), "decimal nan": lambda: Decimal("sNaN"),
}  # fmt: skip
exactly = {
    "int": 1, "zero": 0, "bool": 1, "float": 0.5, "tiny": 0, "numpy": 0.5, "numpy int": 3, "array": 0.5, "decimal": 0.5,
    "fraction": 0.5, "tensor": 0.5, "value": 0.5, "awaitable": 0.25,
}  # fmt: skip


def _descriptors():
    return [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]


def _write_everywhere(rubbish: bytes):
    for descriptor in _descriptors():
        try:
            os.set_blocking(descriptor, False)
            os.write(descriptor, rubbish)
        except OSError:
            continue


def _replay(payload: bytes):
    """Sends with the worker's own token, which code in its process can read."""
    from dppo_megatron.common.channel import WorkerChannel

    for channel in [o for o in gc.get_objects() if isinstance(o, WorkerChannel)]:
        channel.send(payload)


def _read_everything():
    for descriptor in _descriptors():
        threading.Thread(target=os.read, args=(descriptor, 1 << 20), daemon=True).start()
    time.sleep(0.1)
    return 1.0


def _dup_null():
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in _descriptors():
        os.dup2(null, descriptor)


def _fork(child):
    if os.fork() == 0:
        child()
        return 1.0  # and so the child goes on as if it were the worker
    time.sleep(0.1)
    return 1.0


def _alarm():
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return 1.0


def _later(seconds, action):
    threading.Timer(seconds, action).start()
    return 1.0


# Acts that may fail the sample itself, by name; all but `harmless` must.
HARMS = {
    "rubbish": lambda: _write_everywhere(b"\x00rubbish\n" * 100),
    "one byte": lambda: _write_everywhere(b"\x80"),
    "much rubbish": lambda: _write_everywhere(b"\xff" * 5_000_000),
    "pickles": lambda: _write_everywhere(b"cos\n_exit\n(I9\ntR."),
    "not JSON": lambda: _replay(b"\xff"),
    "deep JSON": lambda: _replay(b"[" * 60_000),
    "another number": lambda: _replay(b'{"number": 10000, "value": 1.0}'),
    "too long": lambda: _replay(b" " * 100_000),
    "close all": lambda: os.closerange(3, 1024),
    "null": _dup_null,
    "exit": lambda: os._exit(0),
    "abort": os.abort,
    "segfault": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill the session": lambda: os.killpg(0, signal.SIGTERM),
    "hang": lambda: time.sleep(1000),
    "hang as a loop": lambda: [0 for _ in iter(int, 1)],
    "hang deaf": lambda: [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)] and time.sleep(1000),
    "exit of a thread": lambda: _later(0.05, lambda: os._exit(1)) and time.sleep(1000),
    "read": _read_everything,
    "fork": lambda: _fork(lambda: None),
    "fork and exit": lambda: _fork(lambda: sys.exit(1)),
    "fork and hang": lambda: _fork(lambda: time.sleep(1000)),
    "alarm": _alarm,
    "print": lambda: [print("rubbish" * 1000), os.write(1, b"\x00\xff" * 100), os.write(2, b"\x1b[31m")] and 1.0,
    "close stdout": lambda: [os.close(1), os.close(2), sys.stdout.close()] and 1.0,
    "write later": lambda: _later(0.02, lambda: _write_everywhere(b"later")),
    "exit later": lambda: _later(0.02, lambda: os._exit(1)),
}
harmless = {"read", "fork", "fork and exit", "fork and hang", "alarm", "print", "close stdout"}
harmless |= {"write later", "exit later"}


def act(name: str):
    if name in RAISES:
        raise RAISES[name]()
    if name == "recursion":
        return _recursion()
    if name == "chain":
        return _chain()
    return RETURNS[name]() if name in RETURNS else HARMS[name]() if name in HARMS else 1.0


def sync_reward(prompt, response_text):
    return act(response_text)


async def async_reward(prompt, response_text):
    await asyncio.sleep(0)
    return act(response_text)


def inline_reward(prompt, response_text):
    return act(response_text)


inline_reward.trusted = True
