"""Rewards that misbehave as the response text says, by dotted path in the tests. Worse ones are in tests/attack."""

import asyncio
import math
import os
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory


async def judge():
    return False


class SharedClient:
    """Shares a client between samples, which belongs to the event loop of its first use."""

    def __init__(self):
        self.loop = None

    async def __call__(self, prompt, response_text):
        self.loop = self.loop or asyncio.get_running_loop()
        self.waiting = asyncio.ensure_future(asyncio.sleep(1000))  # as the tasks of a connection
        return float(self.loop is asyncio.get_running_loop())

    async def check_answer(self, answer):
        self.loop = self.loop or asyncio.get_running_loop()
        if self.loop is not asyncio.get_running_loop():
            raise ValueError("another loop")


def second_call_fails(prompt, response_text, calls=[]):  # noqa: B006
    calls.append(1)
    return 1.0 / (len(calls) % 2)


def strange(prompt, response_text):
    match response_text:
        case "hang":
            time.sleep(1000)
        case "spin":
            while True:
                math.sqrt(2)
        case "leave a process":
            Path(prompt.answer).write_text(f"{subprocess.Popen(['sleep', '1000']).pid}")
            os._exit(7)
        case "coroutine":
            return 1.0 if judge() else 0.0
        case "enter":
            with TemporaryDirectory() as directory:
                os.chdir(directory)
        case "where":
            return float(Path.cwd() == Path(prompt.answer))
        case "threads":
            return float(os.environ["OMP_NUM_THREADS"])
        case "pid":
            return float(os.getpid())
    return 1.0


class Counting:
    """One object per process."""

    def __init__(self):
        self.calls = 0

    def __call__(self, prompt, response_text):
        self.calls += 1
        return self.calls


not_callable = 3


class WrongCount:
    """A reward of groups."""

    async def score_group(self, prompt, texts, timeout_s):
        return [1.0] * (len(texts) + 1)
