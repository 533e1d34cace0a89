"""Environments of the tests: the prompt's answer and the policy's turns decide what happens."""

import asyncio
import os
import time


class Echo:
    """Echoes each turn, `turns` times; the reward of turn t is t."""

    def __init__(self, turns: int = 2):
        self.left = turns
        self.turn = 0

    def reset(self, prompt, seed):
        self.seed = seed

    def step(self, text):
        self.turn += 1
        self.left -= 1
        return f"[{text}]", float(self.turn), self.left == 0


class Opened(Echo):
    """Adds to the prompt; the reward is given at the end, asynchronously."""

    async def reset(self, prompt, seed):
        await asyncio.sleep(0)
        return f"({prompt.answer})"

    async def step(self, text):
        said, _, done = super().step(text)
        return said, None, done

    async def reward(self):
        return 0.5


class Unscored(Echo):
    """Leaves the reward to `reward:` of the config."""

    def step(self, text):
        said, _, done = super().step(text)
        return said, None, done


class Table:
    """Tools: plain functions."""

    def __init__(self):
        self.tools = [self.look_up, double]

    def reset(self, prompt, seed):
        self.rows = {"a": 1, "b": 2}

    def look_up(self, key: str, times: int = 1) -> int:
        """The number in row `key`."""
        return self.rows[key] * times


async def double(x: int) -> int:
    """Twice x."""
    return 2 * x


LOOPS = set()


class Undescribed:
    """An environment with a tool that lacks a docstring."""

    def __init__(self):
        self.tools = [double, self.halve]

    def halve(self, number: int) -> int:
        return number // 2


class Connected(Opened):
    """Shares a client between methods and trajectories, which belongs to the event loop of its first use."""

    async def reset(self, prompt, seed):
        LOOPS.add(asyncio.get_running_loop())

    async def reward(self):
        LOOPS.add(asyncio.get_running_loop())
        return float(len(LOOPS) == 1)


class Hostile:
    """Harms itself as the prompt's answer demands."""

    def reset(self, prompt, seed):
        self.how = prompt.answer
        self._do("reset")

    def step(self, text):
        self._do("step")
        return "go on", None, False

    def reward(self):
        self._do("reward")
        return float("nan") if self.how == "nan" else 1.0

    def _do(self, where):
        match self.how.split():
            case ["raise", at] if at == where:
                raise LookupError("no such thing")
            case ["hang", at] if at == where:
                time.sleep(60)
            case ["die", at] if at == where:
                os._exit(3)


class Broken:
    def __init__(self):
        raise ValueError("cannot be made")


class Unprintable(Echo):
    """Answers half of a surrogate pair."""

    def step(self, text):
        return "\ud800", None, self.turn > 0 or super().step(text)[2]


class Moody(Echo):
    """Answers differently in every process."""

    def step(self, text):
        said, reward, done = super().step(text)
        return f"{said}{os.getpid()}", reward, done


class DiesOnce(Echo):
    """Its process ends at turn `at`, unless that happened before in this directory."""

    def __init__(self, directory, turns, at):
        super().__init__(turns)
        self.directory, self.at = directory, at

    def step(self, text):
        if self.turn == self.at:
            try:
                os.mkdir(self.directory)
            except FileExistsError:
                pass
            else:
                os._exit(3)
        return super().step(text)
