"""The check of a group's samples names the sample and the token at fault."""

from dataclasses import replace

import numpy as np
import pytest

from dppo_megatron.rollout.engines.protocol import GenerateRequest, InvalidSample
from dppo_megatron.rollout.engines.samples import GroupSamples

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
        columns={
            "rollout_logprob": logprobs,
            "versions": np.full(8, 2, np.int32),
            "topk_ids": ids,
            "rollout_topk_logprob": topk,
        },
    )


def check(candidate: GroupSamples, request: GenerateRequest = REQUEST) -> None:
    candidate.check(request, vocab_size=VOCAB, max_model_len=MAX_MODEL_LEN)


def edited(field: str, index, value) -> GroupSamples:
    array = getattr(samples(), field, samples().columns.get(field)).copy()
    array[index] = value
    return changed(samples(), **{field: array})


def changed(group: GroupSamples, **arrays) -> GroupSamples:
    """Replace fields or columns; None removes a column."""
    fields = {name: array for name, array in arrays.items() if name in ("token_ids", "lengths")}
    columns = group.columns | {name: array for name, array in arrays.items() if name not in fields}
    return replace(group, **fields, columns={name: array for name, array in columns.items() if array is not None})


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
        (edited("token_ids", 1, 9), "sample 0, token 1: more tokens follow a stop token"),
        (edited("token_ids", 2, 8), "sample 0, token 2: finish reason is stop"),
        (edited("lengths", 1, 4), "token_ids is of shape"),
        (changed(samples(), rollout_logprob=samples().columns["rollout_logprob"][:-1]), "rollout_logprob is of shape"),
        (changed(samples(), topk_ids=None), "topk_ids is missing"),
        (changed(samples(), versions=np.full(8, 2)), "versions is int64, expected int32"),
        (changed(samples(), token_ids=samples().token_ids.astype(float)), "token_ids is float64, expected int32"),
        (changed(samples(), routed_experts=np.zeros((11, 1, 1), np.uint8)), "routed_experts, which was not requested"),
        (
            changed(samples(), rollout_topk_logprob=samples().columns["rollout_topk_logprob"][:, :1]),
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


def masked(ids: list[list[int]], **arrays) -> GroupSamples:
    """Good samples, drawn from `ids` and 18 and 19 at each of the 8 positions, listed as far as they go."""
    masks = [sorted({*own, 18, 19}) for own in ids]
    flat, counts = np.concatenate([np.array(own, np.int32) for own in masks]), np.array(list(map(len, masks)), np.int32)
    return changed(samples(), **{"sampling_mask_ids": flat, "sampling_mask_counts": counts} | arrays)


WITH_MASK = replace(REQUEST, top_p=0.9, top_k=5, sampling_mask=True)
OWN = [[5], [6], [9], [1], [2], [3], [4], [5]]


def test_sampling_masks_pass_and_split():
    check(masked(OWN), WITH_MASK)
    first, second, third = masked([[5, 7], *OWN[1:]]).rollouts(2)
    assert first.sampling_mask_ids.tolist() == [5, 7, 18, 19, 6, 18, 19, 9, 18, 19]
    assert first.sampling_mask_counts.tolist() == [4, 3, 3]
    assert second.sampling_mask_ids.tolist()[:6] == [1, 18, 19, 2, 18, 19]
    assert third.sampling_mask_ids.tolist() == third.sampling_mask_counts.tolist() == []
    columns = {name: array.copy() for name, array in masked(OWN).columns.items()}
    columns["topk_ids"][2], columns["rollout_topk_logprob"][2] = [9, -1], [columns["rollout_logprob"][2], -np.inf]
    columns["sampling_mask_ids"] = np.delete(columns["sampling_mask_ids"], [7, 8])
    columns["sampling_mask_counts"][2] = 1
    check(replace(samples(), columns=columns), WITH_MASK)


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        (samples(), "sampling_mask_ids is missing"),
        (masked(OWN, sampling_mask_ids=None), r"sampling_mask_ids is missing, expected \(24,\)"),
        (masked(OWN, sampling_mask_counts=np.full(8, 4, np.int32)), r"sampling_mask_ids is of shape \(24,\), expected"),
        (masked(OWN, sampling_mask_ids=np.arange(23, dtype=np.int32)), r"sampling_mask_ids is of shape \(23,\)"),
        (masked([*OWN[:3], [7], *OWN[4:]]), "sample 1, token 0: the sampled token is not in the sampling mask"),
        (masked([*OWN[:2], [9, VOCAB], *OWN[3:]]), "sample 0, token 2: sampling mask id outside"),
        (
            masked(OWN, sampling_mask_ids=masked(OWN).columns["sampling_mask_ids"][::-1]),
            "sample 0, token 0: sampling mask ids are not ascending",
        ),
        (masked(OWN, topk_ids=np.full((8, 2), -1, np.int32)), "sample 0, token 0: the top K are more or fewer"),
        (
            masked(OWN, topk_ids=edited("topk_ids", (4, 1), 7).columns["topk_ids"]),
            "sample 1, token 1: a top-K id is not",
        ),
    ],
)
def test_invalid_sampling_masks_are_named(invalid, message):
    with pytest.raises(InvalidSample, match=f"group g7.*{message}"):
        check(invalid, WITH_MASK)


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
        ({"sampling_mask": True}, "sampling_mask needs top_k"),
        ({"n": 0, "seeds": ()}, "n = 0"),
    ],
)
def test_malformed_requests(change, message):
    with pytest.raises(ValueError, match=message):
        replace(REQUEST, **change)
