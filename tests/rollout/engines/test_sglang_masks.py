"""SGLang's sampling masks and scores as our samples: from the fields of its reply, without a server."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dppo_megatron.rollout.engines.protocol import GenerateRequest, InvalidSample
from dppo_megatron.rollout.engines.sglang.wire import child_ids, decode_group, decode_score, encode_group
from tests.support.engines import group

MODEL = SimpleNamespace(moe=None, num_layers=1)
REQUEST = group("g", n=1, max_tokens=3, topk=2, top_p=0.9, top_k=4, sampling_mask=True)


def reply(**changes) -> bytes:
    """Two tokens: 7 from the mask {2, 7, 9} and 5 from {5}. SGLang's plain log-probs are over the whole vocabulary."""
    meta = {
        "id": child_ids(REQUEST.request_id, 1)[0],
        "output_token_logprobs": [[-3.0, 7, None], [-4.0, 5, None]],
        "output_token_sampling_mask": [[2, 7, 9], [5]],
        "output_token_sampling_logprobs": [[-0.4, -1.5, -2.2], [0.0]],
        "weight_versions": [{"start": 0, "end": 2, "version": "4"}],
        "finish_reason": {"type": "length"},
        **changes,
    }
    return json.dumps([{"output_ids": [7, 5], "meta_info": meta}]).encode()


def test_log_probs_lists_and_sets_are_over_the_tokens_that_truncation_keeps():
    samples = decode_group(reply(), REQUEST, MODEL)
    assert samples.columns["rollout_logprob"].tolist() == [np.float32(-1.5), 0.0]
    assert samples.columns["sampling_mask_ids"].tolist() == [2, 7, 9, 5]
    assert samples.columns["sampling_mask_counts"].tolist() == [3, 1]
    assert samples.columns["topk_ids"].tolist() == [[2, 7], [5, -1]]
    assert samples.columns["rollout_topk_logprob"].tolist() == [[np.float32(-0.4), -1.5], [0.0, -np.inf]]
    sent = encode_group(REQUEST, 3)
    assert sent["return_sampling_mask"]
    assert sent["sampling_logprobs_mode"] == "support"
    assert {"top_p": 0.9, "top_k": 4, "min_p": 0.0}.items() <= sent["sampling_params"][0].items()
    assert "return_sampling_mask" not in encode_group(group("plain"), 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"output_token_sampling_mask": [[2, 7, 9]]},
        {"output_token_sampling_logprobs": [[-0.4, -1.5], [0.0]]},
        {"output_token_sampling_mask": [[2, 7], [5]]},
    ],
)
def test_incomplete_masks_are_refused(changes):
    with pytest.raises(ValueError, match="sampling mask of some of its tokens is missing"):
        decode_group(reply(**changes), REQUEST, MODEL)


def test_a_token_outside_its_mask_has_no_log_prob():
    """`GroupSamples.check` rejects NaN."""
    samples = decode_group(reply(output_token_sampling_mask=[[2, 8, 9], [5]]), REQUEST, MODEL)
    assert np.isnan(samples.columns["rollout_logprob"][0])


def test_scores_have_the_oldest_version_and_the_lists():
    """The last token of the vocabulary, which SGLang reports as token 0, keeps its id."""
    meta = {
        "input_token_logprobs": [[None, 4, None], [-1.5, 0, None]],
        "input_top_logprobs": [None, [[-1.0, 3, None], [-1.5, 63, None]]],
        "weight_version": "4",
        "weight_versions": [{"start": 0, "end": 1, "version": "3"}],
    }
    samples = decode_score(json.dumps({"meta_info": meta}).encode(), [4, 63], 64, topk=2)
    request = GenerateRequest("s", np.array([4, 63]), 1, (0,), 1.0, 1, topk=2, scored=True)
    samples.check(request, vocab_size=64, max_model_len=64)
    (found,) = samples.rollouts(2)
    assert (found.token_ids.tolist(), found.versions.tolist(), found.topk_ids.tolist()) == ([63], [3], [[3, 63]])
    assert (found.rollout_logprob.tolist(), found.rollout_topk_logprob.tolist()) == ([-1.5], [[-1.0, -1.5]])
    with pytest.raises(InvalidSample, match="the scored tokens differ"):
        samples.check(replace(request, token_ids=np.array([4, 5])), vocab_size=64, max_model_len=64)
