"""The clients of both engines reject answers of real servers that were corrupted on the way."""

import json

import numpy as np
import pytest

from dppo_megatron.rollout.engines.protocol import InvalidSample
from dppo_megatron.rollout.engines.vllm.extension.wire import decode_reply, encode_reply
from tests.support.engines import VOCAB, group, with_engine
from tests.support.faults import Proxy

REQUEST = group("tampered", n=3, max_tokens=12, topk=3)


def vllm(change):
    """A tampering of the reply's header and arrays."""

    def tamper(body: bytes) -> bytes:
        header, arrays = decode_reply(body)
        arrays = {name: array.copy() for name, array in arrays.items()}
        change(header, arrays)
        return encode_reply(header, arrays)

    return tamper


def sglang(change):
    """A tampering of the last sample's JSON."""

    def tamper(body: bytes) -> bytes:
        samples = json.loads(body)
        change(samples[-1], samples[-1]["meta_info"])
        return json.dumps(samples).encode()

    return tamper


def _shorter(header, arrays):
    for name in ("token_ids", "rollout_logprob", "versions"):
        arrays[name] = arrays[name][:-1]


def _shorter_sample(sample, meta):
    sample["output_ids"].pop()
    meta["output_token_logprobs"].pop()


def _foreign_token(sample, meta):
    sample["output_ids"][3] = meta["output_token_logprobs"][3][1] = VOCAB


TAMPERINGS = {
    "wrong length": (vllm(_shorter), sglang(_shorter_sample)),
    "no log-prob": (
        vllm(lambda header, arrays: arrays["rollout_logprob"].__setitem__(5, np.nan)),
        sglang(lambda sample, meta: meta["output_token_logprobs"][5].__setitem__(0, None)),
    ),
    "infinite log-prob": (
        vllm(lambda header, arrays: arrays["rollout_topk_logprob"].__setitem__((5, 1), -np.inf)),
        sglang(lambda sample, meta: meta["output_token_logprobs"][5].__setitem__(0, float("-inf"))),
    ),
    "token outside the vocabulary": (
        vllm(lambda header, arrays: arrays["token_ids"].__setitem__(3, VOCAB)),
        sglang(_foreign_token),
    ),
    "top-K tokens lost": (
        vllm(lambda header, arrays: arrays.pop("topk_ids")),
        sglang(lambda sample, meta: meta.pop("output_top_logprobs_idx_flat_b64")),
    ),
    "another request's answer": (
        vllm(lambda header, arrays: header.update(request_id="another")),
        sglang(lambda sample, meta: meta.update(id="another")),
    ),
    "truncated": (lambda body: body[: len(body) // 2],) * 2,
    "empty": (lambda body: b"",) * 2,
}


def generate(served, tamper):
    """Samples of a client whose answers to `generate` pass through `tamper`."""

    async def hook(path, body, forward):
        answer = await forward()
        return tamper(answer) if path.endswith("generate") else answer

    with Proxy(served.url, hook) as proxy:
        return with_engine(served.config, proxy.url, lambda engine: engine.generate(REQUEST))


def test_an_untouched_answer_passes(served):
    assert [len(r.token_ids) for r in generate(served, lambda body: body)] == [12] * 3


@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_invalid_answers_are_refused(served, tampering):
    with pytest.raises(InvalidSample, match="tampered"):
        generate(served, TAMPERINGS[tampering][served.kind == "sglang"])
