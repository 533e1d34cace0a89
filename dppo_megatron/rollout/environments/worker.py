"""Run one environment at a time in a worker process, and give the pool a handle."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from dppo_megatron.common.worker import Answer, Worker, WorkerError, checked
from dppo_megatron.config.task import EnvironmentConfig
from dppo_megatron.errors import shown
from dppo_megatron.rollout.rewards.outcome import LONGEST_DETAIL, Failure, as_outcome, awaited, describe
from dppo_megatron.rollout.rewards.registry import load_attribute, rejected_arguments
from dppo_megatron.types import Prompt

from .interface import CALL_ERROR, EnvironmentFailed, EnvironmentNameError, Message, StepResult
from .tools import ToolCall, Tools, tool_calls

LARGEST_ANSWER = 4 * 1024 * 1024  # bytes of an environment's answer to a turn


class EnvironmentWorker(Worker):
    """Sends requests to the process. Methods raise `EnvironmentFailed` if the environment raised, and `WorkerError`."""

    def __init__(self, config: EnvironmentConfig):
        hello = {"setting": config.setting, "name": config.source, "settings": config.settings}
        peer = config.host if config.agent else ""
        super().__init__(__name__, hello, "environment", LARGEST_ANSWER, peer=peer, sharing=config.workers)
        self._timeout_s = config.timeout_s

    def described(self) -> tuple[list[dict[str, Any]], bool]:
        """Return (tools as chat templates take them, whether `step` exists). Only `step` can reward each turn."""
        description = self._call(list[Any], "for an environment to be created", "described")
        return checked(tuple[list[dict[str, Any]], bool], tuple(description))

    def reset(self, prompt: Prompt, seed: int) -> str | None:
        return self._call(str | None, "for reset", "reset", prompt, seed)

    def step(self, text: str, opened: str = "") -> StepResult:
        """Answer a turn. `opened` is the mark with which the prompt opened the turn's reasoning."""
        answer = self._call(list[Any], "for the answer to a turn", "step", text, opened)
        return StepResult(*checked(tuple[list[Message], float | None, bool], tuple(answer)))

    def finish(self) -> float | None:
        """Return the trajectory reward, or None if the environment gives no reward."""
        return self._call(float | None, "for the reward", "finish")

    def agent(self, prompt: Prompt, url: str, key: str) -> float | None:
        """Run the agent until it returns. Return the reward, or None if the agent gives no reward."""
        return self._call(float | None, "for the agent to return", "agent", prompt, url, key)

    def _call(self, kind: Any, purpose: str, method: str, *arguments: Any) -> Any:
        match self.ask((method, *arguments), self._timeout_s, f"(environment.timeout_s) {purpose}", list[Any]):
            case ["done", answer]:
                return checked(kind, answer)
            case ["failed", str(reason), str(detail)]:
                raise EnvironmentFailed(reason, detail[:LONGEST_DETAIL])
        raise WorkerError("its process sent an invalid reply")


def environment_problem(
    config: EnvironmentConfig, tools: list[Any], *, chat: bool, by_turn: bool = False
) -> str | None:
    """Return why an environment or agent cannot be used, or None without a problem or without an environment.

    Creates the environment, or imports the agent, in a worker process. Tools need a chat template (`chat`), and `step`
    must exist if turns need rewards (`by_turn`). Adds the environment's tools to `tools`.
    """
    if config.source is None:
        return None
    worker = EnvironmentWorker(config)
    try:
        if problem := worker.load():
            return problem
        environment_tools, has_step = worker.described() if config.agent is None else ([], True)
        tools += environment_tools
        setting = f"environment.name = {config.name}"
        if tools and not chat:
            reason = "has tools, which only a chat template shows to the policy"
            return f"{setting}: {reason}; set data.chat_template = true, or give it `step` instead"
        if not (tools or has_step):
            return f"{setting}: has neither `tools` nor `step`; give it one of them"
        if by_turn and not has_step:
            reason = f"{setting} has no method `step`, and only it gives turns their rewards"
            return f"objective.credit = turn: {reason}; set credit to trajectory, or give it one"
    except (WorkerError, EnvironmentFailed) as error:
        return f"{config.described}: no environment can be created: {error}"
    finally:
        worker.end()
    return None


def load(hello: dict[str, Any]) -> tuple[str | None, Answer]:
    """Import the environment or agent in the worker process."""
    try:
        make, settings = load_attribute(hello["setting"], hello["name"], EnvironmentNameError), hello["settings"]
        is_agent = hello["setting"] == "environment.agent"
        if is_agent and (reason := rejected_arguments(make, "url", "key", {}, **settings)):
            raise EnvironmentNameError(
                f"environment.agent = {hello['name']}: the call (url, key, row, **environment.settings) fails, "
                f"{reason}; correct its parameters or environment.settings = {shown(settings)}"
            )
    except EnvironmentNameError as error:
        problem = str(error)

        def no_environment(*_: Any) -> Any:
            raise EnvironmentNameError(problem)

        return problem, _Host(no_environment).answer
    return None, _Host(partial(make, **settings)).answer


class _Host:
    """Runs the environment in the worker process. `make` is the environment class, or the agent."""

    def __init__(self, make: Callable[..., Any]):
        self._make = make
        self._environment: Any = None

    def answer(self, request: bytes) -> list[Any]:
        """Answer a request. Any error in user code fails only this trajectory."""
        try:
            kind, *arguments = pickle.loads(request)
            outcome = getattr(self, f"_{kind}")(*arguments)
        except BaseException as error:
            return ["failed", "raised", describe(error)]
        return ["failed", *outcome] if isinstance(outcome, Failure) else ["done", outcome]

    def _described(self) -> list[Any]:
        environment = self._make()
        for method, names in (("reset", "prompt, seed"), ("step", "text")):
            if problem := rejected_arguments(getattr(environment, method, lambda *_: None), *names.split()):
                raise TypeError(f"{method}: {problem}; write {method}(self, {names})")
        return [Tools(getattr(environment, "tools", ())).schemas, hasattr(environment, "step")]

    def _reset(self, prompt: Prompt, seed: int) -> str | None:
        self._environment = self._make()
        self._stepped = Tools(getattr(self._environment, "tools", ()))
        self._rewards: list[float] = []
        self._call_numbers = itertools.count()
        opening = awaited(self._environment.reset(prompt, seed)) if hasattr(self._environment, "reset") else None
        return None if opening is None else _text(opening)

    def _step(self, text: str, opened: str = "") -> list[Any] | Failure:
        if not hasattr(self._environment, "step"):
            calls = tool_calls(opened + text, self._stepped.schemas)
            return [[self._result(call) for call in calls], None, not calls]
        outcome = awaited(self._environment.step(text))
        if not isinstance(outcome, (tuple, list)) or len(outcome) != 3:
            raise TypeError(f"step returned {shown(outcome)}, expected (text, reward or None, whether it is the end)")
        observation, reward, done = outcome
        if reward is not None:
            reward = as_outcome(reward)
            if isinstance(reward, Failure):
                return reward
            self._rewards.append(reward)
        return [[{"role": "user", "content": _text(observation)}] if observation else [], reward, bool(done)]

    def _result(self, call: ToolCall) -> Message:
        try:
            content = _text(awaited(self._stepped.call(call)))
        except EnvironmentFailed:
            raise
        except Exception as error:
            content = CALL_ERROR + describe(error)
        id = call.named("", next(self._call_numbers))
        return {"role": "tool", "content": content, "tool_call_id": id, "name": call.name}

    def _finish(self) -> float | Failure | None:
        environment, self._environment = self._environment, None
        if hasattr(environment, "reward"):
            return as_outcome(awaited(environment.reward()))
        return as_outcome(sum(self._rewards)) if self._rewards else None

    def _agent(self, prompt: Prompt, url: str, key: str) -> float | Failure | None:
        reward = awaited(self._make(url, key, prompt.columns))
        return None if reward is None else as_outcome(reward)


def _text(value: Any) -> str:
    """Return the value as text that a tokenizer accepts, without halves of surrogate pairs."""
    return str(value).encode(errors="backslashreplace").decode()
