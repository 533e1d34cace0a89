"""Rewards that misbehave, named by dotted path in the tests. The response text names the way."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory


async def judge():
    return False


def strange(prompt, response_text):
    match response_text:
        case "raise":
            raise KeyError("no such thing")
        case "exit":
            sys.exit(0)
        case "hang":
            time.sleep(1000)
        case "spin":
            while True:
                math.sqrt(2)
        case "die":
            os._exit(7)
        case "leave a process":
            Path(prompt.answer).write_text(f"{subprocess.Popen(['sleep', '1000']).pid}")
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "nan":
            return float("nan")
        case "huge":
            return 1e300
        case "none":
            return None
        case "unpicklable":

            class Local(Exception):
                def __init__(self, one, two):
                    super().__init__(one)

            raise Local(1, 2)
        case "coroutine":
            return 1.0 if judge() else 0.0
        case "enter":
            with TemporaryDirectory() as directory:
                os.chdir(directory)
        case "where":
            return float(Path.cwd() == Path(prompt.answer))
        case "pid":
            return float(os.getpid())
        case "columns":
            return prompt.columns["bonus"]
    return 1.0


def trusted(prompt, response_text):
    return strange(prompt, response_text)


trusted.trusted = True


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
