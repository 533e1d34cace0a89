"""Adapt reasoning-gym tasks: one question and one answer, scored by the dataset that generated the question."""

from __future__ import annotations

from typing import Any

from dppo_megatron.types import Prompt

from . import seed_of


class ReasoningGym:
    """Poses questions from `dataset` with the settings `config`: a question per group, after the row's prompt."""

    def __init__(self, dataset: str, config: dict[str, Any] | None = None, tag: str | None = "answer"):
        """Check the settings. tag: the last <tag>...</tag> has the answer; None: the whole turn is the answer."""
        import reasoning_gym
        from reasoning_gym.utils import extract_answer

        self._create = reasoning_gym.create_dataset
        self._extract = extract_answer
        self._dataset, self._config, self._tag = dataset, config or {}, tag
        self._create(dataset, **self._config, seed=0, size=1)  # raises at once for wrong settings

    def reset(self, prompt: Prompt, seed: int) -> str:
        self._questions = self._create(self._dataset, **self._config, seed=seed_of(prompt, seed), size=1)
        self._question = self._questions[0]
        return self._question["question"]

    def step(self, text: str) -> tuple[str, float, bool]:
        answer = text.strip() if self._tag is None else self._extract(text, self._tag)
        return "", float(self._questions.score_answer(answer, self._question)), True
