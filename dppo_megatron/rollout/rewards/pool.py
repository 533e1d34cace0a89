"""Score responses in separate processes with timeouts, so that no reward can stop or stall the run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo_megatron.errors import shown
from dppo_megatron.types import Prompt

from .interface import GroupReward
from .outcome import Failure, Outcome, as_outcome, attempt, describe, final_answer, problem_of
from .registry import BUILTIN, build_rewards
from .tally import Tally
from .worker import RewardWorker
from .workers import WorkerPool

if TYPE_CHECKING:
    from dppo_megatron.config.schema import RewardConfig

_ANSWERS = 64  # answers that a worker checks per request
_TEXTS = 32  # final answers per worker reply
_ANSWERS_S = 60.0  # limit for a request; then each answer is checked separately within reward.timeout_s


class RewardPool:
    """Scores responses with the rewards that `config` names, `config.workers` at a time.

    A sample scores 0 and is marked failed if its verifier raises, returns a value that is not a finite number, exceeds
    `config.timeout_s`, or breaks the process. Processes that hang, die or write to the result channel are replaced.
    Rewards with `trusted = True` are called directly, without process or timeout. Remote rewards are awaited here.

    With several terms, a sample's reward is the weighted sum over the terms for the row's data source. The sample fails
    if any of these terms fails or no term applies. Example: weights 1 and 0.5 with outcomes 1 and -1 give 0.5.

    The constructor raises `RewardError` for a reward that does not exist. Close the pool, or use it as a context
    manager.
    """

    def __init__(self, config: RewardConfig):
        self._config = config
        self._terms = config.all_terms
        self._rewards = build_rewards(config)
        terms = [(term.name, term.settings) for term in self._terms]
        self._workers = WorkerPool(lambda: RewardWorker(terms, config.workers), config.workers, "verifier")
        self._tally = Tally([term.name for term in self._terms])
        self._closed = False

    async def score(
        self, prompt: Prompt, texts: Sequence[str], *, recorded: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (rewards [n] fp32, failed [n] bool) for n responses to a prompt; reward errors are not raised.

        `recorded` states whether `take_metrics` includes these responses.
        """
        rewards = np.zeros(len(texts), dtype=np.float32)
        failed = np.zeros(len(texts), dtype=bool)
        for i, parts in enumerate(await self._outcomes(prompt, texts)):
            total = self._total(prompt, parts)
            self._tally.add(prompt, parts, total, recorded)
            if isinstance(total, Failure):
                failed[i] = True
            else:
                rewards[i] = total
        return rewards, failed

    async def final_answers(self, prompt: Prompt, texts: Sequence[str]) -> list[str | None] | None:
        """Return the answers that the row's first term with `final_answer` finds, or None without such a term."""
        for term in self._applying(prompt.source):
            if not hasattr(self._rewards[term], "final_answer"):
                continue
            if self._trusted(term):
                return [final_answer(self._rewards[term], text) for text in texts]
            batches = [texts[i : i + _TEXTS] for i in range(0, len(texts), _TEXTS)]
            out: list[str | None] = []
            for batch in batches:
                future = self._workers.submit(RewardWorker.final_answers, term, batch, self._config.timeout_s)
                answers = await asyncio.wrap_future(future)
                out += [None] * len(batch) if isinstance(answers, Failure) else answers
            return out
        return None

    def take_metrics(self) -> dict[str, float]:
        """Return how many samples failed since the last call, by reason, and with several terms the mean per term."""
        return self._tally.take_metrics()

    @property
    def last_failure(self) -> str:
        """Return reason and text of the last failed reward, or "" if no reward failed."""
        return self._tally.last_failure

    def check_answers(self, rows: Sequence[tuple[str, str]]) -> list[str | None]:
        """Return, for each row (data source, answer), why no response can be scored, or None if responses can be."""
        problems: dict[tuple[int, str], str | None] = {}
        answers_by_term: dict[int, dict[str, None]] = {}  # term -> distinct answers
        for source, answer in rows:
            for term in self._applying(source):
                if hasattr(self._rewards[term], "check_answer"):
                    answers_by_term.setdefault(term, {})[answer] = None
        for term, answers in answers_by_term.items():
            problems |= {(term, answer): problem for answer, problem in self._read(term, list(answers))}
        out = []
        for source, answer in rows:
            terms = self._applying(source)
            row_problems = (problems.get((term, answer)) for term in terms)
            out.append(next(filter(None, row_problems), None) if terms else self._no_term(source))
        return out

    def try_once(self, prompts: Sequence[Prompt]) -> list[tuple[str, Failure]]:
        """Call each user-defined term twice; return (name, first failure) of each failing term.

        A term runs in a single worker. It gets the first prompt that it applies to, and the prompt's answer as the
        response. The second call finds the state that the first call left, for example a client.
        """
        first_prompts = {term: p for p in reversed(prompts) for term in self._applying(p.source)}
        futures = {
            term: self._workers.submit(_failure_of_two, p, term, self._config.timeout_s)
            for term, p in first_prompts.items()
            if self._terms[term].name not in BUILTIN and not isinstance(self._rewards[term], GroupReward)
        }
        replies = ((self._terms[term].name, future.result()) for term, future in futures.items())
        return [(name, failure) for name, failure in replies if isinstance(failure, Failure)]

    def close(self) -> None:
        """Stop the workers at once, including running verifiers. May be called again."""
        if not self._closed:
            self._closed = True
            self._workers.close()
            self._tally.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _applying(self, source: str) -> list[int]:
        return [i for i, term in enumerate(self._terms) if not term.sources or source in term.sources]

    def _no_term(self, source: str) -> str:
        return f"no term of reward.terms is for the data source {shown(source)}"

    def _trusted(self, term: int) -> bool:
        return bool(getattr(self._rewards[term], "trusted", False))

    async def _outcomes(self, prompt: Prompt, texts: Sequence[str]) -> list[dict[int, Outcome]]:
        """Return for each text the outcome of every applicable term."""
        parts: list[dict[int, Outcome]] = [{} for _ in texts]
        waits, in_workers = [], []
        for term in self._applying(prompt.source):
            reward = self._rewards[term]
            if isinstance(reward, GroupReward):
                waits.append(self._by_remote(term, reward, prompt, texts, parts))
            elif self._trusted(term):
                for text, part in zip(texts, parts, strict=True):
                    part[term] = attempt(reward, prompt, text)
            else:
                in_workers.append(term)
        if in_workers:
            waits += [self._by_worker(in_workers, prompt, text, parts[i]) for i, text in enumerate(texts)]
        await asyncio.gather(*waits)
        return parts

    async def _by_worker(self, terms: list[int], prompt: Prompt, text: str, parts: dict[int, Outcome]) -> None:
        future = self._workers.submit(RewardWorker.score, prompt, text, terms, self._config.timeout_s)
        outcomes = await asyncio.wrap_future(future)
        if isinstance(outcomes, Failure):
            outcomes = [outcomes] * len(terms)
        parts |= zip(terms, outcomes, strict=True)

    async def _by_remote(
        self, term: int, reward: GroupReward, prompt: Prompt, texts: Sequence[str], parts: list[dict[int, Outcome]]
    ) -> None:
        timeout_s = self._config.timeout_s
        outcomes: list[Outcome]
        try:
            rewards = await reward.score_group(prompt, texts, timeout_s)
            outcomes = [None if reward is None else as_outcome(reward) for reward in rewards]
            if len(outcomes) != len(texts):
                raise ValueError(f"it returned {len(outcomes)} values for {len(texts)} responses")
        except TimeoutError:
            outcomes = [Failure("timeout", f"no answer within reward.timeout_s = {timeout_s:g} s")] * len(texts)
        except Exception as error:
            outcomes = [Failure("raised", describe(error))] * len(texts)
        for part, outcome in zip(parts, outcomes, strict=True):
            part[term] = outcome

    def _total(self, prompt: Prompt, parts: Mapping[int, Outcome]) -> float | Failure:
        total, applied = 0.0, False
        for term, outcome in parts.items():
            if isinstance(outcome, Failure):
                prefix = f"{self._terms[term].name}: " if len(self._terms) > 1 else ""
                return outcome._replace(detail=prefix + outcome.detail)
            if outcome is not None:
                applied = True
                total += self._terms[term].weight * outcome
        if not applied:
            return Failure("not_applicable", self._no_term(prompt.source) if not parts else "every term returned None")
        return as_outcome(total)

    def _read(self, term: int, answers: list[str]) -> list[tuple[str, str | None]]:
        """Return (answer, why the term rejects it or None). Workers check batches; after a failure, single answers."""
        if self._trusted(term):
            return [(answer, problem_of(self._rewards[term], answer)) for answer in answers]
        batches = [answers[i : i + _ANSWERS] for i in range(0, len(answers), _ANSWERS)]
        out: list[tuple[str, str | None]] = []
        batch_timeout_s = min(_ANSWERS_S, _ANSWERS * self._config.timeout_s)
        for batch, problems in zip(batches, self._checked(term, batches, batch_timeout_s), strict=True):
            if isinstance(problems, Failure):
                replies = self._checked(term, [[answer] for answer in batch], self._config.timeout_s)
                problems = [p.detail if isinstance(p, Failure) else p[0] for p in replies]
            out += zip(batch, problems, strict=True)
        return out

    def _checked(self, term: int, batches: list[list[str]], timeout_s: float) -> list[list[str | None] | Failure]:
        futures = [self._workers.submit(RewardWorker.check, term, batch, timeout_s) for batch in batches]
        return [future.result() for future in futures]


def _failure_of_two(worker: RewardWorker, prompt: Prompt, term: int, timeout_s: float) -> Any:
    """Call a term twice; return the first failure, or None."""
    outcomes = (worker.score(prompt, prompt.answer, [term], timeout_s)[0] for _ in range(2))
    return next((outcome for outcome in outcomes if isinstance(outcome, Failure)), None)
