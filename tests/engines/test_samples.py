"""What makes a group's samples unfit, named down to the token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dppo_megatron.engines.protocol import GenerateRequest, InvalidSample
from dppo_megatron.engines.samples import GroupSamples

VOCAB, MAX_MODEL_LEN = 20, 16
REQUEST = GenerateRequest("g7", np.array([3, 4]), 3, (1, 2, 3), 1.0, 5, stop_token_ids=(9,), topk=2)


def samples() -> GroupSamples:
    """Three good samples: stopped after 3 tokens, truncated at 5, aborted with none."""
    tokens = np.array([5, 6, 9, 1, 2, 3, 4, 5], np.int32)
    logprobs = np.linspace(-3, -2, 8, dtype=np.float32)
    ids = np.stack([np.full(8, 18), np.full(8, 19)], 1).astype(np.int32)
    ids[0] = [5, 19]
    topk = np.tile(np.array([-1.0, -1.5], np.float32), (8, 1))
    topk[0] = [logprobs[0], logprobs[0] - 1]
    return GroupSamples(
        lengths=np.array([3, 5, 0], np.int32),
        finish_reasons=("stop", "length", "abort"),
        token_ids=tokens,
        rollout_logprob=logprobs,
        versions=np.full(8, 2, np.int32),
        topk_ids=ids,
        rollout_topk_logprob=topk,
    )


def check(candidate: GroupSamples, request: GenerateRequest = REQUEST) -> None:
    candidate.check(request, vocab_size=VOCAB, max_model_len=MAX_MODEL_LEN)


def edited(field: str, index, value) -> GroupSamples:
    array = getattr(samples(), field).copy()
    array[index] = value
    return replace(samples(), **{field: array})


def test_good_samples_pass_and_split():
    check(samples())
    rollouts = samples().rollouts(len(REQUEST.token_ids))
    assert [r.token_ids.tolist() for r in rollouts] == [[5, 6, 9], [1, 2, 3, 4, 5], []]
    assert [r.finish_reason for r in rollouts] == ["stop", "length", "abort"]
    assert rollouts[1].topk_ids.shape == (5, 2)


def test_length_may_be_that_of_the_model():
    full = replace(REQUEST, token_ids=np.ones(MAX_MODEL_LEN - 3, np.int32))
    check(replace(samples(), finish_reasons=("length", "length", "abort"), token_ids=_without_stop()), full)


def _without_stop():
    tokens = samples().token_ids.copy()
    tokens[2] = 7
    return tokens


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        (edited("token_ids", 4, VOCAB), r"sample 1, token 1: token id outside \[0, 20\)"),
        (edited("token_ids", 0, -1), "sample 0, token 0: token id"),
        (edited("rollout_logprob", 2, np.nan), "sample 0, token 2: log-prob is missing"),
        (edited("rollout_logprob", 7, -np.inf), "sample 1, token 4: log-prob is missing"),
        (edited("rollout_logprob", 3, 0.01), "sample 1, token 0: log-prob above 0"),
        (edited("versions", 5, -1), "sample 1, token 2: token carries no policy version"),
        (edited("token_ids", 1, 9), "sample 0, token 1: goes on after a stop token"),
        (edited("token_ids", 2, 8), "sample 0, token 2: finish reason is stop"),
        (edited("lengths", 1, 4), "token_ids is of shape"),
        (replace(samples(), rollout_logprob=samples().rollout_logprob[:-1]), "rollout_logprob is of shape"),
        (replace(samples(), topk_ids=None), "topk_ids is missing"),
        (
            replace(samples(), rollout_topk_logprob=samples().rollout_topk_logprob[:, :1]),
            "rollout_topk_logprob is of shape",
        ),
        (replace(samples(), finish_reasons=("stop", "length")), "2 finish reasons"),
        (replace(samples(), finish_reasons=("stop", "length", "error")), "sample 2: finish reason is none of"),
        (replace(samples(), finish_reasons=("length", "length", "abort")), "sample 0: ended for its length"),
        (replace(samples(), finish_reasons=("stop", "length", "stop")), "sample 2: no token at all"),
        (edited("topk_ids", (3, 1), VOCAB), "sample 1, token 0: top-K id outside"),
        (edited("topk_ids", (3, 1), 18), "sample 1, token 0: an id is in the top K twice"),
        (edited("rollout_topk_logprob", (3, 1), np.nan), "sample 1, token 0: top-K log-prob is missing"),
        (edited("rollout_topk_logprob", (3, 1), -0.5), "sample 1, token 0: top-K log-probs are not in order"),
        (edited("rollout_topk_logprob", 3, (-0.1, -0.2)), "sample 1, token 0: top-K probabilities sum"),
        (edited("rollout_topk_logprob", (0, 0), -2.5), "sample 0, token 0: top-K log-prob of the sampled token"),
    ],
)
def test_invalid_samples_are_named(invalid, message):
    with pytest.raises(InvalidSample, match=f"group g7.*{message}"):
        check(invalid)


def kept(ids: list[list[int]], **changes) -> GroupSamples:
    """Good samples, drawn from `ids` and 18 and 19 at each of the 8 positions, listed as far as they go."""
    sets = [sorted({*own, 18, 19}) for own in ids]
    flat = np.concatenate([np.array(own, np.int32) for own in sets])
    return replace(
        samples(), **{"kept_ids": flat, "kept_counts": np.array([len(own) for own in sets], np.int32)} | changes
    )


TRUNCATED = replace(REQUEST, top_p=0.9, top_k=5, kept=True)
OWN = [[5], [6], [9], [1], [2], [3], [4], [5]]


def test_kept_sets_pass_and_split():
    check(kept(OWN), TRUNCATED)
    first, second, third = kept([[5, 7], *OWN[1:]]).rollouts(2)
    assert first.kept_ids.tolist() == [5, 7, 18, 19, 6, 18, 19, 9, 18, 19]
    assert first.kept_counts.tolist() == [4, 3, 3]
    assert second.kept_ids.tolist()[:6] == [1, 18, 19, 2, 18, 19]
    assert third.kept_ids.tolist() == third.kept_counts.tolist() == []
    alone = kept(OWN, topk_ids=kept(OWN).topk_ids.copy(), rollout_topk_logprob=kept(OWN).rollout_topk_logprob.copy())
    alone.topk_ids[2], alone.rollout_topk_logprob[2] = [9, -1], [alone.rollout_logprob[2], -np.inf]
    ids, counts = np.delete(alone.kept_ids, [7, 8]), alone.kept_counts.copy()
    counts[2] = 1
    check(replace(alone, kept_ids=ids, kept_counts=counts), TRUNCATED)


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        (samples(), "the kept ids of 8 tokens are incomplete"),
        (kept(OWN, kept_counts=np.full(8, 4, np.int32)), "the kept ids of 8 tokens are incomplete"),
        (kept(OWN, kept_ids=kept(OWN).kept_ids[:-1]), "the kept ids of 8 tokens are incomplete"),
        (kept([*OWN[:3], [7], *OWN[4:]]), "sample 1, token 0: the sampled token is not among those"),
        (kept([*OWN[:2], [9, VOCAB], *OWN[3:]]), "sample 0, token 2: kept id outside"),
        (kept(OWN, kept_ids=kept(OWN).kept_ids[::-1]), "sample 0, token 0: kept ids are not ascending"),
        (kept(OWN, topk_ids=np.full((8, 2), -1, np.int32)), "sample 0, token 0: the top K are more or fewer"),
        (replace(kept(OWN), topk_ids=edited("topk_ids", (4, 1), 7).topk_ids), "sample 1, token 1: a top-K id is not"),
    ],
)
def test_invalid_kept_sets_are_named(invalid, message):
    with pytest.raises(InvalidSample, match=f"group g7.*{message}"):
        check(invalid, TRUNCATED)


def test_longer_than_asked_for():
    with pytest.raises(InvalidSample, match="sample 1: longer than max_tokens = 4"):
        check(samples(), replace(REQUEST, max_tokens=4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": np.array([])}, "non-empty vector"),
        ({"seeds": (1,)}, "1 seeds for n = 3"),
        ({"seeds": (1, 2, -3)}, "seeds must lie"),
        ({"temperature": 0.001}, "temperature = 0.001"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"topk": -1}, "topk = -1"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_k": -1}, "top_k = -1"),
        ({"min_p": 1.5}, "min_p = 1.5"),
        ({"kept": True}, "kept needs top_k"),
        ({"n": 0, "seeds": ()}, "n = 0"),
    ],
)
def test_malformed_requests(change, message):
    with pytest.raises(ValueError, match=message):
        replace(REQUEST, **change)
