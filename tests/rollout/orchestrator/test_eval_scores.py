"""avg@n, its standard error, pass@k and maj@n against values computed by hand."""

import json
import math

import numpy as np
import pytest

from dppo_megatron.config.task import EvalSet
from dppo_megatron.report.heldout import describe
from dppo_megatron.report.tail import has_evaluation
from dppo_megatron.rollout.orchestrator.eval_scores import average, ks, majority, pass_at
from dppo_megatron.rollout.orchestrator.evaluation import scores

RIGHT = np.array([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]], bool)


ONCE = np.array([[1], [0], [1], [0]], bool)


@pytest.mark.parametrize(
    ("right", "expected"),
    [
        # Shares 1/2, 1/4, 0: mean 1/4, deviations 1/4, 0, 1/4, so the error is sqrt((2/16) / 2 / 3) = 1/sqrt(48).
        (RIGHT, (0.25, 1 / math.sqrt(48))),
        (ONCE, (0.5, math.sqrt(1 / 12))),
        (np.repeat(ONCE, 8, axis=1), (0.5, math.sqrt(1 / 12))),  # eight equal answers count as one
        (RIGHT[:1], (0.5, None)),  # a single prompt
    ],
)
def test_the_average_and_its_standard_error_are_over_prompts(right, expected):
    assert average(right) == pytest.approx(expected)


def test_pass_at_k_is_the_mean_over_all_choices_of_k_answers():
    from itertools import combinations

    right = np.random.default_rng(0).random((5, 9)) < 0.3
    for k in (1, 3, 7):
        chosen = [any(row[list(choice)]) for row in right for choice in combinations(range(9), k)]
        assert pass_at(k, right) == pytest.approx(np.mean(chosen))


def test_which_k_are_reported():
    assert ks(1) == []
    assert ks(2) == [2]
    assert ks(32) == [2, 4, 8, 16, 32]
    assert ks(12) == [2, 4, 8, 12]


@pytest.mark.parametrize(
    ("right", "answers", "expected"),
    [
        ([1, 1, 0], ["7", "7", "8"], 1.0),
        ([1, 0, 0], ["7", "8", "8"], 0.0),
        ([1, 0, 1, 0], ["7", "8", "7", "8"], 0.5),  # a tie
        ([1, 0, 0], ["7", "8", "9"], 1 / 3),
        ([1, 0, 0], ["7", None, None], 1.0),  # no answer, no vote
        ([0, 0, 0], [None, None, None], 0.0),
    ],
)
def test_majority(right, answers, expected):
    assert majority(np.array([right], bool), [answers]) == pytest.approx(expected)


def sample(reward, final, *, failed=False, tokens=10, finish="stop", versions=(3, 3)):
    return {"text": "", "reward": reward, "failed": failed, "tokens": tokens, "finish": finish,
            "versions": list(versions), "final": final}  # fmt: skip


def test_an_answer_that_was_not_graded_is_not_right():
    """Even where a reward of 0 is."""
    chosen = EvalSet(path="unused", n=2, temperature=1.0, pass_reward=0.0)
    records = [{"samples": [sample(0.0, "7"), sample(0.0, "7", failed=True)]}]
    assert scores("aime", chosen, records, 1.0)["eval/aime/avg@2"] == 0.5


def test_the_metrics_of_the_held_out_set():
    records = [{"samples": [sample(1.0, "7")]}, {"samples": [sample(0.5, "8", tokens=30, versions=(2, 4))]}]
    assert scores("heldout", EvalSet(path="unused", n=1, temperature=0.0), records, 2.0) == {
        "eval/accuracy": 1 / 2,
        "eval/reward_mean": 0.75,
        "eval/response_tokens_mean": 20.0,
        "eval/prompts": 2,
        "eval/version_spread": 2,
        "time/eval_s": 2.0,
    }


def test_the_metrics_of_a_set():
    """DAPO's rewards are 1 and -1: an average of rewards would not be the share of right answers."""
    records = [
        {"samples": [sample(1.0, "7"), sample(1.0, "7"), sample(-1.0, "8"), sample(-1.0, None, finish="length")]},
        {"samples": [sample(-1.0, "8"), sample(-1.0, "8"), sample(0.0, "7", failed=True), sample(1.0, "7", tokens=30)]},
    ]
    found = scores("aime", EvalSet(path="unused", n=4, temperature=0.7), records, 2.0)
    assert found == {
        "eval/aime/avg@4": 3 / 8,
        "eval/aime/avg@4_stderr": pytest.approx(1 / 8),
        "eval/aime/pass@2": pytest.approx((5 / 6 + 3 / 6) / 2),
        "eval/aime/pass@4": 1.0,
        "eval/aime/maj@4": pytest.approx((1 + (0 + 1 / 2) / 2) / 2),  # 8 and 7 tie; of the 7s one was not graded
        "eval/aime/reward_mean": pytest.approx(-1 / 8),
        "eval/aime/failed_share": 1 / 8,
        "eval/aime/response_tokens_mean": 12.5,
        "eval/aime/truncated_share": 1 / 8,
        "eval/aime/prompts": 2,
        "eval/aime/version_spread": 0,
        "eval/aime/seconds": 2.0,
    }
    for metrics in (found, scores("heldout", EvalSet(path="unused"), [{"samples": [sample(1.0, "7")]}], 2.0)):
        line = json.dumps({"step": 10**9, "time": 1795983894.125, **metrics})
        assert has_evaluation(line.encode())  # without its metrics to be parsed
    assert describe("aime", found) == (
        "aime: avg@4 0.3750 ± 0.1250, pass@2 0.6667, pass@4 1.0000, maj@4 0.6250, 12.5% not graded, "
        "mean reward -0.125; 12 tokens, 12.5% truncated, 2 prompts"
    )
