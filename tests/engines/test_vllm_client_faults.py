"""The vLLM client against servers that are dead, silent, busy or talk nonsense: a clear error, in bounded time."""

from __future__ import annotations

import asyncio
import json
import socket
from uuid import UUID

import numpy as np
import pytest

from dppo_megatron.engines.protocol import (
    EngineError,
    EngineIncompatible,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    GenerateRequest,
    InvalidSample,
)
from dppo_megatron.engines.vllm.client import VllmEngine
from dppo_megatron.engines.vllm.extension.wire import encode_reply
from dppo_megatron.launch.evaluate import with_settings
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
    monkeypatch.setattr("dppo_megatron.engines.vllm.client.uuid4", lambda: UUID(int=0))


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


def test_server_that_dies_while_generating(config):
    with pytest.raises(EngineUnavailable, match="generation of group g"):
        against(config, INFO_REPLY | {"/dppo/generate": [b""]}, generate)


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(good_reply()[:-10], id="cut"),
        pytest.param(b"not HTTP at all\r\n\r\n", id="no HTTP"),
        pytest.param(b"HTTP/1.1 200 x\r\ncontent-length: many\r\n\r\n", id="no length"),
        pytest.param(b"HTTP/1.1 200 x\r\ncontent-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc", id="no gzip"),
    ],
)
def test_a_reply_that_is_no_whole_reply(config, reply):
    """The connection is closed behind it."""
    with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1.*connection failed during generation of group g: \S"):
        against(config, INFO_REPLY | {"/dppo/generate": [Last(reply)]}, generate)


def test_a_reply_that_points_elsewhere_is_not_followed(config):
    elsewhere = b"HTTP/1.1 307 x\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n"
    with pytest.raises(EngineError, match="failed with status 307"):
        against(config, INFO_REPLY | {"/dppo/generate": [elsewhere], "/elsewhere": [good_reply()]}, generate)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "use", "what"),
    [
        ("/dppo/generate", generate, r"generation of group g \(engine\.request_timeout_s, .* raise it"),
        ("/dppo/score", lambda engine: engine.score(np.arange(3)), "scoring of 3 tokens"),
        ("/dppo/load_weights", lambda engine: engine.load_weights("/some/policy", 4), "policy 4 from /some/policy"),
    ],
)
def test_silent_server(config, path, use, what):
    with pytest.raises(EngineTimeout, match=rf"127\.0\.0\.1.*within 1 s.*{what}"):
        against(config, INFO_REPLY | {path: [None]}, use)


def test_busy_server_is_asked_again(config):
    replies = [http(503, b"paused"), http(503, b"paused"), good_reply()]
    assert len(against(config, INFO_REPLY | {"/dppo/generate": replies}, generate)) == 2


def test_server_that_stays_busy(config):
    with pytest.raises(EngineTimeout):
        against(config, INFO_REPLY | {"/dppo/generate": [http(503, b"paused")] * 50}, generate)


@pytest.mark.parametrize(
    ("status", "error"), [(400, EngineRefused), (404, EngineIncompatible), (409, EngineError), (500, EngineError)]
)
def test_errors_carry_the_servers_reason(config, status, error):
    reply = http(status, json.dumps({"error": "the reason"}).encode())
    with pytest.raises(error, match=f"status {status}: the reason"):
        against(config, INFO_REPLY | {"/dppo/generate": [reply]}, generate)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (http(200, b"<html>hello</html>"), "not safetensors"),
        (http(200, b""), "not safetensors"),
        (http(200, encode_reply(GOOD_HEADER, GOOD_ARRAYS)[:-3]), "not fully covered"),
        (http(200, encode_reply(GOOD_HEADER, GOOD_ARRAYS) + b"x"), "not fully covered"),
        (http(200, encode_reply(GOOD_HEADER, GOOD_ARRAYS)[:20]), "invalid header length"),
        (http(200, encode_reply({"request_id": "g~00000000"}, GOOD_ARRAYS)), "lacks 'finish_reasons'"),
        (http(200, encode_reply({**GOOD_HEADER, "request_id": "h"}, GOOD_ARRAYS)), "the reply is to 'h'"),
        (http(200, encode_reply(GOOD_HEADER, {"lengths": GOOD_ARRAYS["lengths"]})), "lacks 'token_ids'"),
        (
            good_reply(rollout_logprob=np.full(8, np.nan, np.float32)),
            "sample 0, token 0: log-prob is missing or not finite",
        ),
    ],
)
def test_garbled_replies_are_invalid_samples(config, reply, message):
    with pytest.raises(InvalidSample, match=message) as error:
        against(config, INFO_REPLY | {"/dppo/generate": [reply]}, generate)
    assert "127.0.0.1" in str(error.value)


def test_samples_of_a_restarted_server_are_refused(config):
    info = http(200, json.dumps(INFO | {"instance": "first instance"}).encode())
    reply = http(200, encode_reply(GOOD_HEADER | {"instance": "second instance"}, GOOD_ARRAYS))
    with pytest.raises(EngineUnavailable, match="the server was restarted"):
        against(config, {"/dppo/info": [info], "/dppo/generate": [reply]}, generate)


@pytest.mark.parametrize("logprobs", [[-1.0], [-1.0, np.nan], [-1.0, 0.5]])
def test_invalid_scores(config, logprobs):
    reply = http(200, encode_reply({"version": 3}, {"logprobs": np.array(logprobs, np.float32)}))
    with pytest.raises(InvalidSample, match="scoring of 3 tokens"):
        against(config, INFO_REPLY | {"/dppo/score": [reply]}, lambda engine: engine.score(np.arange(3)))


@pytest.mark.parametrize("body", [b"not json", b"[]", b'{"version": 3}'])
def test_garbled_description(config, body):
    with pytest.raises(EngineError, match="description"):
        against(config, INFO_REPLY | {"/dppo/info": [http(200, body)]}, VllmEngine.version)


def test_load_weights_that_reports_another_version(config):
    with pytest.raises(EngineError, match="the reply has version 3"):
        against(
            config,
            INFO_REPLY | {"/dppo/load_weights": [http(200, b'{"version": 3}')]},
            lambda engine: engine.load_weights("/some/policy", 4),
        )


def test_hundreds_of_requests_at_once(tmp_path):
    patient = engine_config(tmp_path / "model", request_timeout_s=20)

    async def many(engine):
        return await asyncio.gather(*(engine.generate(REQUEST) for _ in range(300)))

    assert len(against(patient, INFO_REPLY | {"/dppo/generate": [good_reply()] * 300}, many)) == 300
