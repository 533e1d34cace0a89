"""The stock routes that teachers are asked by, against the model in float64."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dppo_megatron.engines.kinds import KINDS
from dppo_megatron.engines.protocol import EngineRefused
from tests.support.engines import MAX_LOGPROBS, VOCAB

# The last id of the vocabulary, which SGLang does not name for the sequence itself, is among the tokens and the lists.
TOKENS = [5, *np.random.default_rng(0).integers(0, VOCAB, 198).tolist(), VOCAB - 1]


def asked(served, tokens: list[int], k: int) -> tuple[list, list]:
    kind = KINDS[served.kind]
    path, body = kind.lists_request(tokens, k)
    reply = served.use(lambda engine: engine._calls.call("lists", path, body=body))
    return kind.decode_lists(json.loads(reply), tokens, k)


def test_lists_are_those_of_the_model(served):
    logprobs, lists = asked(served, TOKENS, MAX_LOGPROBS)
    exact = served.reference("a").logprobs(np.array(TOKENS[:1]), np.array(TOKENS[1:]))
    rows = np.arange(len(TOKENS) - 1)
    np.testing.assert_allclose(logprobs, exact[rows, TOKENS[1:]], atol=1e-4)
    pairs = np.array(lists)
    ids, values = pairs[:, :, 0].astype(int), pairs[:, :, 1]
    assert pairs.shape == (len(TOKENS) - 1, MAX_LOGPROBS, 2)
    np.testing.assert_allclose(values, np.sort(exact, axis=1)[:, : -MAX_LOGPROBS - 1 : -1], atol=1e-4)
    np.testing.assert_allclose(values, exact[rows[:, None], ids], atol=1e-4)
    assert (ids == VOCAB - 1).any()


def test_a_list_beyond_the_limit_is_refused(served):
    if served.kind == "sglang":
        pytest.skip("SGLang has no limit of K")
    with pytest.raises(EngineRefused, match=f"max allowed: {MAX_LOGPROBS}"):
        asked(served, TOKENS, MAX_LOGPROBS + 1)
