"""The vLLM client against servers that are dead, silent, busy or talk nonsense: a clear error, in bounded time."""

import asyncio
import json
import socket
from uuid import UUID

import numpy as np
import pytest

from dppo_megatron.rollout.engines.protocol import (
    EngineError,
    EngineIncompatible,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    GenerateRequest,
    InvalidSample,
)
from dppo_megatron.rollout.engines.vllm.client import VllmEngine
from dppo_megatron.rollout.engines.vllm.extension.wire import encode_reply
from dppo_megatron.run.launch.evaluate import with_settings
from tests.support.engines import engine_config, with_engine
from tests.support.fakes.http_server import Last, against, http

REQUEST = GenerateRequest("g", np.array([1, 2, 3]), 2, (5, 6), 1.0, 4)
INFO = {
    "version": 3,
    "vocab_size": 10,
    "max_model_len": 32,
    "max_logprobs": 8,
    "logprobs_mode": "processed_logprobs",
    "dtype": "float32",
    "model": "/nowhere",
    "engine": "fake",
    "running": 0,
    "problems": [],
}
INFO_REPLY = {"/dppo/info": [http(200, json.dumps(INFO).encode())] * 9}
GOOD_ARRAYS = {
    "lengths": np.array([4, 4], np.int32),
    "token_ids": np.arange(8, dtype=np.int32),
    "rollout_logprob": np.full(8, -1.0, np.float32),
    "versions": np.full(8, 3, np.int32),
}
GOOD_HEADER = {"request_id": "g~00000000", "finish_reasons": ["length", "length"]}


@pytest.fixture(autouse=True)
def known_request_ids(monkeypatch):
    monkeypatch.setattr("dppo_megatron.rollout.engines.vllm.client.uuid4", lambda: UUID(int=0))


@pytest.fixture
def config(tmp_path):
    return with_settings(engine_config(tmp_path / "model", request_timeout_s=1.0), weight_sync={"timeout_s": 1.0})


def generate(engine):
    return engine.generate(REQUEST)


def good_reply(**changed) -> bytes:
    return http(200, encode_reply(GOOD_HEADER, GOOD_ARRAYS | changed))


def test_dead_server(config):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        for use in (VllmEngine.health, generate, lambda engine: engine.score(np.arange(3))):
            with pytest.raises(EngineUnavailable, match=rf"{url}: .*; start that engine, or correct its URL"):
                with_engine(config, url, use)


NANS = np.full(8, np.nan, np.float32)
BODY = encode_reply(GOOD_HEADER, GOOD_ARRAYS)
BROKEN = [  # the connection is closed behind them
    *(b"", Last(good_reply()[:-10]), Last(b"not HTTP at all\r\n\r\n")),
    Last(b"HTTP/1.1 200 x\r\ncontent-length: many\r\n\r\n"),
    Last(b"HTTP/1.1 200 x\r\ncontent-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc"),
]
REASONS = {400: EngineRefused, 404: EngineIncompatible, 409: EngineError, 500: EngineError}
GARBLED = [
    (b"<html>hello</html>", "not safetensors"),
    (b"", "not safetensors"),
    (BODY[:-3], "not fully covered"),
    (BODY + b"x", "not fully covered"),
    (BODY[:20], "invalid header length"),
    (encode_reply({"request_id": "g~00000000"}, GOOD_ARRAYS), "lacks 'finish_reasons'"),
    (encode_reply({**GOOD_HEADER, "request_id": "h"}, GOOD_ARRAYS), "the reply is to 'h'"),
    (encode_reply(GOOD_HEADER, {"lengths": GOOD_ARRAYS["lengths"]}), "lacks 'token_ids'"),
    (encode_reply(GOOD_HEADER, GOOD_ARRAYS | {"rollout_logprob": NANS}), "sample 0, token 0: log-prob is missing"),
]


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        *((reply, EngineUnavailable, r"connection failed during generation of group g: \S") for reply in BROKEN),
        (b"HTTP/1.1 307 x\r\nlocation: /dppo/info\r\ncontent-length: 0\r\n\r\n", EngineError, "failed with status 307"),
        (http(503, b"paused"), EngineTimeout, "generation of group g"),
        *((http(n, b'{"error": "the reason"}'), error, f"status {n}: the reason") for n, error in REASONS.items()),
        (http(200, encode_reply(GOOD_HEADER | {"instance": "b"}, GOOD_ARRAYS)), EngineUnavailable, "was restarted"),
        *((http(200, body), InvalidSample, message) for body, message in GARBLED),
    ],
)  # fmt: skip
def test_every_fault_of_a_sampling_server_raises_its_own_error(config, reply, error, message):
    """A redirection is not followed."""
    with pytest.raises(error, match=message) as raised:
        against(config, INFO_REPLY | {"/dppo/generate": [reply] * 50}, generate)
    assert "127.0.0.1" in str(raised.value)


def score(engine):
    return engine.score(np.arange(3))


def load(engine):
    return engine.load_weights("/some/policy", 4)


SILENT = [
    ("/dppo/generate", generate, r"generation of group g \(engine\.request_timeout_s, .* raise it"),
    ("/dppo/score", score, "scoring of 3 tokens"),
    ("/dppo/load_weights", load, "policy 4 from /some/policy"),
]
DESCRIPTIONS = (b"not json", b"[]", b'{"version": 3}')
SCORES = [encode_reply({}, {"logprobs": np.float32(values)}) for values in ([-1.0], [-1.0, np.nan], [-1.0, 0.5])]


@pytest.mark.parametrize(
    ("path", "use", "reply", "error", "message"),
    [
        *(("/dppo/score", score, http(200, body), InvalidSample, "scoring of 3 tokens") for body in SCORES),
        *(("/dppo/info", VllmEngine.info, http(200, body), EngineError, "description") for body in DESCRIPTIONS),
        ("/dppo/load_weights", load, http(200, b'{"version": 3}'), EngineError, "the reply has version 3"),
        *(
            pytest.param(path, use, None, EngineTimeout, rf"127\.0\.0\.1.*within 1 s.*{what}", marks=pytest.mark.slow)
            for path, use, what in SILENT
        ),
    ],
)
def test_wrong_and_missing_replies(config, path, use, reply, error, message):
    with pytest.raises(error, match=message):
        against(config, INFO_REPLY | {path: [reply]}, use)


def test_busy_server_is_asked_again(config):
    replies = [http(503, b"paused"), http(503, b"paused"), good_reply()]
    assert len(against(config, INFO_REPLY | {"/dppo/generate": replies}, generate)) == 2


def test_hundreds_of_requests_at_once(tmp_path):
    patient = engine_config(tmp_path / "model", request_timeout_s=20)

    async def many(engine):
        return await asyncio.gather(*(engine.generate(REQUEST) for _ in range(300)))

    assert len(against(patient, INFO_REPLY | {"/dppo/generate": [good_reply()] * 300}, many)) == 300
