"""The needle task has the stated probabilities, and verdicts follow the rules of the study."""

import json
from collections import Counter
from math import log

import numpy as np
import pytest

from dppo_megatron.types import Prompt
from studies.needle import claims, needle


def rewards(first: str, noise: float = 0.0, samples: int = 2000) -> float:
    prompt = Prompt(0, 0, np.zeros(0, np.int32), "a b c d =", "")
    return sum(needle.reward(prompt, f"{first} {n}", noise) for n in range(samples)) / samples


def test_first_words_have_their_exact_shares(tmp_path, monkeypatch):
    monkeypatch.setattr(needle, "TEXT", 5000)
    needle.make_task(tmp_path / "one", 0.01, seed=3)
    needle.make_task(tmp_path / "two", 0.01, seed=3)
    for name in ("train.jsonl", "heldout.jsonl", "warmup.jsonl", "random_model/model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    text = [json.loads(line) for line in (tmp_path / "one" / "warmup.jsonl").read_text().splitlines()]
    firsts = Counter(needle.first_word(row["answer"]) for row in text)
    assert (firsts[needle.NEEDLE], firsts[needle.USUAL]) == (50, 5000 - 50 - 100)
    assert {len(row["answer"].split()) for row in text} == {3, 4, 5}
    assert len(set(needle.VOCABULARY)) == needle.VOCABULARY_SIZE


@pytest.mark.parametrize(
    ("first", "noise", "share"), [("needle", 0, 1.0), ("usual", 0, 0.3), ("needle", 1, 0.5), ("baba", 1, 0.5)]
)
def test_only_the_right_word_has_a_sure_reward(first, noise, share):
    assert abs(rewards(first, noise) - share) < 0.04
    assert (rewards(first, noise) == 1) == (share == 1)


def test_the_steps_to_half_are_interpolated_or_a_lower_bound():
    assert claims.half([{"needle": share} for share in (0.1, 0.4, 0.6)]) == 1.5
    assert claims.half([{"needle": 0.1}] * 4) == 4.0
    shares = ([0.1, 0.2, 0.6], [0.1, 0.6, 0.0], [0.1, 0.1])
    curves = [[{"needle": share} for share in each] for each in shares]
    assert [claims.reaches_half(curve) for curve in curves] == [True, True, False]
    assert [claims.lost(curve) for curve in curves] == [False, True, False]


def verdict(ratio: float, spread: float, equal: bool) -> str:
    """The verdict on the only claim, of eight seeds in which theirs / ours is about `ratio`."""
    claim = claims.Claim("", ("ours", "c"), ("theirs", "c"), "tail", equal)
    curves = {
        (method, "c", seed): [{"tail": 0.1 * (ratio * np.exp(spread * (seed - 4.5)) if method == "theirs" else 1)}]
        for method in ("ours", "theirs")
        for seed in range(1, 9)
    }
    (found,) = claims.verdicts((claim,), curves)
    assert found.low < log(ratio) < found.high
    return found.text


def test_a_verdict_follows_its_rule():
    assert [verdict(ratio, 0.1, False) for ratio in (2, 0.5, 1.05)] == ["confirmed", "refuted", "not resolved"]
    assert [verdict(ratio, 0.02, True) for ratio in (1.05, 2, 0.5)] == ["confirmed", "refuted", "refuted"]
    assert verdict(1.05, 0.2, True) == "not resolved"
