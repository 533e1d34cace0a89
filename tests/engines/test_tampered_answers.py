"""Real answers of real servers, corrupted on their way: refused, whatever the engine, never handed on."""

from __future__ import annotations

import asyncio
import json

import httpx
import numpy as np
import pytest

from dppo_megatron.engines.kinds import build_engine
from dppo_megatron.engines.protocol import InvalidSample
from dppo_megatron.engines.secret import read_secret
from dppo_megatron.engines.vllm.extension.wire import decode_reply, encode_reply
from tests.support.engines import VOCAB, group

pytestmark = pytest.mark.timeout(300)

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


async def through_proxy(served, tamper, use):
    """Result of `use` on a client whose answers to `generate` pass through `tamper`."""

    async def forward(reader, writer):
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split()
                headers = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = int(headers.split(b"content-length:")[1].split()[0]) if b"content-length:" in headers else 0
                body = await reader.readexactly(size)
                answer = await upstream.request(
                    method, path, content=body, headers={"content-type": "application/json"} if body else None
                )
                content = tamper(answer.content) if path.endswith("generate") else answer.content
                writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n" % (answer.status_code, len(content)))
                writer.write(content)
                await writer.drain()
        finally:
            writer.close()

    secret = {"authorization": f"Bearer {read_secret(served.config)}"}
    async with httpx.AsyncClient(base_url=served.url, headers=secret, timeout=60, trust_env=False) as upstream:
        proxy = await asyncio.start_server(forward, "127.0.0.1", 0)
        engine = build_engine(served.config, f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
        try:
            return await use(engine)
        finally:
            await engine.close()
            proxy.close()


def test_an_untouched_answer_passes(served):
    rollouts = asyncio.run(through_proxy(served, lambda body: body, lambda engine: engine.generate(REQUEST)))
    assert [len(r.token_ids) for r in rollouts] == [12] * 3


@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_invalid_answers_are_refused(served, tampering):
    tamper = TAMPERINGS[tampering][served.kind == "sglang"]
    with pytest.raises(InvalidSample, match="tampered"):
        asyncio.run(through_proxy(served, tamper, lambda engine: engine.generate(REQUEST)))
