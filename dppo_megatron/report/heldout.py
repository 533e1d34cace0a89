"""Selects held-out scores and describes them in words, for logs, terminal, report and curves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from dppo_megatron.config.task import HELDOUT

_RIGHT = re.compile(r"eval/(?:([^/]+)/)?(accuracy|avg@[0-9]+)")
_EQUAL = 1e-6  # the mean of fp32 rewards 0 and 1 differs by less from the share of right answers


def heldout_scores(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return metric -> label for the held-out scores in a run's records; data.eval comes first.

    Each set has a share of right answers. With a graded reward, the mean reward differs and is added. A share that is
    always 0 is left out if a mean reward is above 0, because no answer reaches `pass_reward`.
    Example: {"eval/accuracy": "accuracy", "eval/math/avg@4": "math avg@4", "eval/math/reward_mean": "math reward"}.
    """
    highest: dict[str, dict[str, float]] = {}  # share of right answers -> highest share, highest reward
    for record in records:
        for name in record:
            if (match := _RIGHT.fullmatch(name)) and record[name] is not None:
                reward = f"{name.removesuffix(match[2])}reward_mean"
                graded = record.get(reward) is not None and abs(record[reward] - record[name]) > _EQUAL
                best = highest.setdefault(name, {})
                for score in (name, reward) if graded else (name,):
                    best[score] = max(best.get(score, record[score]), record[score])
    labels = {}
    for name, best in sorted(highest.items()):
        prefix = "".join(f"{part} " for part in name.split("/")[1:-1])
        for score in best:
            if score != name or best[name] or max(best.values()) <= 0:
                labels[score] = prefix + {"reward_mean": "reward"}.get(kind := score.rpartition("/")[2], kind)
    return labels


def score_format(name: str) -> str:
    """Return the format of a score: a number for a mean reward, a percentage for every other score."""
    return ".3f" if name.endswith("reward_mean") else ".1%"


def describe(name: str, metrics: Mapping[str, float], first: Mapping[str, float] | None = None) -> str:
    """Describe the result on a held-out set in one line, with the change since the result `first`.

    Example: `130 (+12) of 500 right`, and with a graded reward `0 of 64 right, mean reward 0.015`.
    """
    prefix = "eval/" if name == HELDOUT else f"eval/{name}/"
    now, baseline = ({n.removeprefix(prefix): value for n, value in row.items()} for row in (metrics, first or {}))

    def shown(score: str, form: str, scale: float = 1.0) -> str:
        change = f" ({(now[score] - baseline[score]) * scale:+{form}})" if score in baseline else ""
        return f"{now[score] * scale:{form}}{change}"

    share = next(score for score in now if score == "accuracy" or re.fullmatch(r"avg@\d+", score))
    graded = abs(now.get("reward_mean", now[share]) - now[share]) > _EQUAL
    reward = [f"mean reward {shown('reward_mean', '.3f')}"] if graded else []
    if name == HELDOUT and not now.get("prompts"):  # written by another version
        return ", ".join([f"accuracy {shown('accuracy', '.1%')}", *reward])
    if name == HELDOUT:
        return ", ".join([f"{shown('accuracy', '.0f', now['prompts'])} of {now['prompts']:.0f} right", *reward])
    parts = []
    for score in now:
        if "@" in score and not score.endswith("_stderr"):
            error = now.get(f"{score}_stderr")
            parts.append(f"{score} {shown(score, '.4f')}" + ("" if error is None else f" ± {error:.4f}"))
    if now["failed_share"]:
        parts.append(f"{now['failed_share']:.1%} not graded")
    return (
        f"{name}: {', '.join(parts + reward)}; {now['response_tokens_mean']:.0f} tokens, "
        f"{now['truncated_share']:.1%} truncated, {now['prompts']:.0f} prompts"
    )
