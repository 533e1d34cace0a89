"""Call rewards in a process, and give the pool a handle."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from dppo_megatron.common.worker import Answer, Worker, WorkerError
from dppo_megatron.types import Prompt

from .outcome import LONGEST_DETAIL, Failure, Outcome, attempt, describe, final_answer, problem_of, refuse_unawaited
from .registry import RewardError, load_reward

Terms = Sequence[tuple[str, Mapping[str, Any]]]  # name and settings of each reward
_Part = (
    float | None | Annotated[list[str], Field(min_length=2, max_length=2)]
)  # a reward, none, or [reason, detail] of a `Failure`


class RewardWorker(Worker):
    """Sends requests to a process that runs the rewards `terms`, one of `sharing` such processes."""

    def __init__(self, terms: Terms, sharing: int = 1):
        super().__init__(__name__, {"terms": tuple(terms)}, "verifier", sharing=sharing)

    def score(self, prompt: Prompt, text: str, terms: Sequence[int], timeout_s: float) -> list[Outcome]:
        """Return the outcome of each given term for a response, all within `timeout_s`. Raises `WorkerError`."""
        parts = self.ask(
            ("score", prompt, text, tuple(terms)), timeout_s, "(reward.timeout_s) for the reward", list[_Part]
        )
        if len(parts) != len(terms):
            raise WorkerError("its process sent an invalid reply")
        return [Failure(part[0], part[1][:LONGEST_DETAIL]) if isinstance(part, list) else part for part in parts]

    def check(self, term: int, answers: Sequence[str], timeout_s: float) -> list[str | None]:
        """Return why a term cannot compare with each answer, or None if it can. Raises `WorkerError`."""
        return self.ask(("check", term, tuple(answers)), timeout_s, "for answers to be read", list[str | None])

    def final_answers(self, term: int, texts: Sequence[str], timeout_s: float) -> list[str | None]:
        """Return the answer that a term finds in each text, or None if it finds no answer. Raises `WorkerError`."""
        return self.ask(("final", term, tuple(texts)), timeout_s, "for the answers in responses", list[str | None])


def load(hello: dict[str, Any]) -> tuple[str | None, Answer]:
    """Load the rewards in the worker process."""
    rewards, problem = [], None
    home = os.open(".", os.O_RDONLY)
    try:
        rewards = [load_reward(name, settings) for name, settings in hello["terms"]]
    except RewardError as error:
        problem = str(error)
    refuse_unawaited()
    return problem, partial(_answer, rewards, problem, home)


def _answer(rewards: Sequence[Any], problem: str | None, home: int, request: bytes) -> list[Any]:
    """Answer a request. `problem` is why no rewards exist. `home` is the start directory's descriptor."""
    try:
        kind, *arguments = pickle.loads(request)
    except BaseException as error:
        return [Failure("raised", describe(error))]
    if kind == "check":
        term, answers = arguments
        return [problem or problem_of(rewards[term], answer) for answer in answers]
    if kind == "final":
        term, texts = arguments
        return [None if problem else final_answer(rewards[term], text) for text in texts]
    prompt, text, terms = arguments
    if problem is not None:
        return [Failure("raised", problem[:LONGEST_DETAIL])] * len(terms)
    parts = []
    for term in terms:
        os.fchdir(home)  # an earlier call may have entered a deleted directory
        parts.append(attempt(rewards[term], prompt, text))  # a `Failure` becomes a list in JSON
    return parts
