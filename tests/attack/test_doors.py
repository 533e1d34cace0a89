"""Doors: routes without the secret, unexpected bodies, weights from elsewhere, files that run code."""

import asyncio
import errno
import json
import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import httpx
import pytest

from dppo_megatron.config import Config, read_config, save_resolved
from dppo_megatron.rollout.engines.guard.asgi import SECRET_VARIABLE, Guard
from dppo_megatron.rollout.engines.http import EngineCalls
from dppo_megatron.rollout.engines.kinds import kind_of, server_environment
from dppo_megatron.rollout.engines.protocol import EngineIncompatible
from dppo_megatron.rollout.engines.secret import NoSecret, make_secret, read_secret
from dppo_megatron.run.launch.engine import EngineStartError, _wait_healthy
from tests.attack import cases, generator
from tests.attack.conftest import SECRET
from tests.support.configs import make_config

KNOWN = {"authorization": f"Bearer {SECRET}"}
BEFORE = Path(__file__).parents[1] / "data" / "run_before" / "run"  # written by an earlier version


def answers(app, requests):
    """Each reply to (method, path, keywords of httpx), one after the other."""

    async def main():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return [await client.request(method, path, **more) for method, path, more in requests]

    return asyncio.run(main())


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": SECRET},
        {"authorization": "Bearer "},
        {"authorization": f"Bearer {SECRET} "},
        {"authorization": f"Bearer {SECRET[:-1]}"},
        {"authorization": f"Bearer {SECRET.upper()}"},
        {"authorization": f"Basic {SECRET}"},
        {"x-api-key": SECRET},
    ],
)
def test_no_route_answers_without_the_secret(served, headers):
    paths = {route.path for route in served.app.routes} | {"/nowhere", "/health/", "//health", "/healthy"}
    methods = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
    requests = [(method, path, {"headers": headers}) for path in sorted(paths) for method in methods]
    for (method, path, _), reply in zip(requests, answers(served.app, requests), strict=True):
        expected = 200 if (method, path) == ("GET", "/health") else 401
        assert reply.status_code == expected, (method, path)
    assert not served.engine.called


def test_a_server_without_a_secret_refuses_every_request():
    async def app(*_):
        raise AssertionError("let in")

    requests = [("GET", "/x", {"headers": h}) for h in ({}, {"authorization": "Bearer "}, {"authorization": ""})]
    for reply in answers(Guard(app, secret=""), requests):
        assert reply.status_code == 401
        assert SECRET_VARIABLE in reply.json()["error"]


def test_a_websocket_without_the_secret_is_closed():
    sent = []

    async def main(headers):
        async def send(message):
            sent.append(message["type"])

        async def app(*_):
            sent.append("let in")

        scope = {"type": "websocket", "path": "/v1/realtime", "headers": headers}
        await Guard(app, secret=SECRET)(scope, None, send)

    asyncio.run(main([]))
    asyncio.run(main([(b"authorization", f"Bearer {SECRET}".encode())]))
    assert sent == ["websocket.close", "let in"]


GOOD = {
    "generate": {"request_id": "g", "token_ids": [1], "n": 1, "seeds": [0], "temperature": 1.0, "max_tokens": 4},
    "score": {"token_ids": [1, 2]},
    "abort": {"request_id": "g"},
    "load_weights": {"path": "/nowhere", "version": 3, "mode": "keep", "wait_s": 1.0},
    "receive_weights": {"group": "g", "step": "s", "version": 3, "mode": "keep", "wait_s": 1.0},
    "join_weight_group": {
        **{"name": "g", "host": "127.0.0.1", "port": 9, "backend": "gloo", "timeout_s": 1.0, "workers": 1},
        **{"streams": [[[["w", "float32", [2]]]]], "first_worker": 0},
    },
}
WRONG = (None, True, -1, 2**63, 1e400, 0.5, "", "x" * 5000, "\ud800", [], [[]], {}, {"a": 1}, [1.5], ["1"], "NaN")


def malformed(case: int) -> tuple[str, bytes]:
    """A route and a body that it cannot mean."""
    draw = generator("body", case)
    name = draw.choice(sorted(GOOD))
    body = dict(GOOD[name])
    kind = draw.randrange(6)
    if kind == 0:
        del body[draw.choice(sorted(set(body) - {"first_worker"}))]
    elif kind == 1:
        body["extra"] = 1
    elif kind == 2:
        field = draw.choice(sorted(body))
        wrong = draw.choice([w for w in WRONG if type(w) is not type(body[field])])
        wrong = None if isinstance(wrong, float) and isinstance(body[field], float) else wrong
        body[field] = "" if isinstance(body[field], float | int) and isinstance(wrong, int | float) else wrong
    elif kind == 3:
        return name, json.dumps(body).encode()[: -draw.randrange(1, 9)]
    elif kind == 4:
        return name, draw.randbytes(draw.randrange(200))
    else:
        return name, draw.choice((b"", b"null", b"[]", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe{}", b"1e999"))
    return name, json.dumps(body).encode()


def test_malformed_bodies_are_refused_in_a_line(served, caplog):
    bodies = [malformed(case) for case in range(cases(300))]
    requests = [("POST", f"/dppo/{name}", {"headers": KNOWN, "content": body}) for name, body in bodies]
    with caplog.at_level(logging.ERROR):
        for (name, body), reply in zip(bodies, answers(served.app, requests), strict=True):
            assert reply.status_code == 400, (name, body[:300], reply.text)
            error = reply.json()["error"]
            assert error
            assert "\n" not in error
            assert len(error) < 2000
    assert not caplog.records
    assert not served.engine.called


@pytest.mark.parametrize("name", ["outside", "above", "link", "prefix", "nul"])
def test_weights_outside_the_run_directory_are_not_loaded(served, tmp_path, name):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run-of-another").mkdir()
    (served.run / "weights" / "link").symlink_to(tmp_path / "elsewhere")
    path = {
        "outside": tmp_path / "elsewhere",
        "above": served.run / ".." / "elsewhere",
        "link": served.run / "weights" / "link",
        "prefix": tmp_path / "run-of-another",
        "nul": f"{served.run}/\0",
    }[name]
    body = GOOD["load_weights"] | {"path": str(path), "version": 37}
    (reply,) = answers(served.app, [("POST", "/dppo/load_weights", {"headers": KNOWN, "json": body})])
    assert reply.status_code == 400
    assert name == "nul" or "weights are loaded only from" in reply.json()["error"]
    assert served.updater.version == 0
    assert not served.engine.called


def test_the_guard_of_a_stock_server_refuses_paths_outside_the_run(tmp_path):
    """The guard that stands before a stock SGLang."""
    reached = []

    async def app(scope, receive, send):
        reached.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    (tmp_path / "run").mkdir()
    guard = Guard(app, secret=SECRET, paths={"/load": "model_path"}, roots=[str(tmp_path / "run")])
    bodies = [{"model_path": str(tmp_path)}, {"model_path": 3}, {}, [], {"model_path": str(tmp_path / "run" / "v1")}]
    requests = [("POST", "/load", {"headers": KNOWN, "json": body}) for body in bodies]
    assert [reply.status_code for reply in answers(guard, requests)] == [400, 400, 400, 400, 200]
    assert [json.loads(body) for body in reached] == [bodies[-1]]


def run_config(directory: Path, **engine) -> Config:
    return make_config(run={"dir": directory}, model={"path": BEFORE / "model"}, engine=engine)


def test_the_secret_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    config = run_config(tmp_path / "runs" / "a")
    with ThreadPoolExecutor(16) as starting:
        list(starting.map(lambda _: make_secret(config), range(64)))
    path = config.run.dir / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(config.run.dir.stat().st_mode) == 0o700
    secret = read_secret(config)
    assert len(secret) > 40
    make_secret(config)
    assert read_secret(config) == secret
    assert read_secret(run_config(tmp_path / "runs" / "b")) is None


def test_a_secret_that_others_could_read_is_closed_and_reported(tmp_path, caplog):
    config = run_config(tmp_path)
    make_secret(config)
    (tmp_path / "secret").chmod(0o644)
    make_secret(config)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert "could be read by others (mode 644)" in caplog.text


def test_a_secret_file_of_ones_own(tmp_path, monkeypatch):
    config = run_config(tmp_path / "run", secret_file=tmp_path / "shared")
    for use in (make_secret, read_secret):
        with pytest.raises(NoSecret, match=r"engine.secret_file = .*shared: no such file; correct the path"):
            use(config)
    (tmp_path / "shared").write_text("ours\n")
    make_secret(config)
    assert read_secret(config) == "ours"
    assert not (tmp_path / "run" / "secret").exists()
    monkeypatch.setattr("dppo_megatron.rollout.engines.secret.WRITTEN_S", 0.1)
    (tmp_path / "shared").write_text("")
    with pytest.raises(NoSecret, match="is empty; write another into it"):
        make_secret(config)


@pytest.mark.parametrize("held", [b"two\nlines", b"DPPO\x00SECRET", "schlüssel".encode(), b"\xff"])
def test_a_secret_that_no_request_can_bring_is_refused_and_not_shown(tmp_path, held):
    """httpx and h11 put a header that they refuse into their errors, which are logged."""
    config = run_config(tmp_path / "run", secret_file=tmp_path / "shared")
    (tmp_path / "shared").write_bytes(held)
    for use in (make_secret, read_secret):
        with pytest.raises(NoSecret, match=r"shared: must be one line of ASCII; leave only the secret in it$"):
            use(config)


def test_a_secret_that_cannot_be_closed_or_read_is_reported(tmp_path, caplog, monkeypatch):
    config = run_config(tmp_path / "run", secret_file=tmp_path / "shared")
    (tmp_path / "shared").write_text("ours")
    (tmp_path / "shared").chmod(0o644)

    def fail(number):
        def call(*_arguments, **_settings):
            raise OSError(number, os.strerror(number))

        return call

    monkeypatch.setattr(Path, "chmod", fail(errno.EROFS))
    make_secret(config)
    assert "could be read by others (mode 644); write another into it, and give it to the servers" in caplog.text
    monkeypatch.setattr(Path, "read_bytes", fail(errno.EACCES))
    with pytest.raises(NoSecret, match="shared: this user cannot read it"):
        make_secret(config)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_secret_is_in_the_servers_environment_and_not_on_its_command_line(tmp_path, kind):
    config = run_config(tmp_path, kind=kind, dtype="fp32", max_model_len=64)
    make_secret(config)
    secret = read_secret(config)
    assert server_environment(config, 0)[SECRET_VARIABLE] == secret
    assert server_environment(config, 0).get("VLLM_API_KEY", secret) == secret
    assert secret not in " ".join(kind_of(config).command(config, 1, config.model.path, 0))
    assert secret not in config.model_dump_json()


def test_a_resolved_config_holds_no_secret(tmp_path):
    """Files of a run. Tests of real servers check its logs and processes."""
    config = run_config(tmp_path / "run", secret_file=tmp_path / "shared")
    (tmp_path / "shared").write_text("hidden")
    save_resolved(config, tmp_path / "c.yaml")
    assert "hidden" not in (tmp_path / "c.yaml").read_text()
    assert read_config(tmp_path / "c.yaml").engine.secret_file == tmp_path / "shared"


@pytest.mark.parametrize(("secret", "why"), [("x", "it has another secret than this run"), (None, "sends none")])
async def test_a_refused_client_reports_whether_it_sent_a_secret(secret, why):
    calls = EngineCalls("http://engine", secret, "")
    calls._request = AsyncMock(return_value=(401, b'{"error": "not authorized"}'))
    with pytest.raises(EngineIncompatible, match=rf"status 401: not authorized \(.*{why}"):
        await calls.json("its description", "/info")


def test_a_server_that_rejects_its_own_launcher_is_reported(tmp_path, monkeypatch):
    """A container without the environment has no secret and rejects all requests."""
    error = EngineIncompatible("status 401: this server was started without DPPO_SECRET")
    engine = Mock(return_value=AsyncMock(**{"health.side_effect": error}))
    config = run_config(tmp_path, start_timeout_s=0.2)
    monkeypatch.setattr("dppo_megatron.run.launch.engine.build_engine", engine)
    with pytest.raises(EngineStartError, match=r"\(engine.start_timeout_s\); at last: status 401: .*DPPO_SECRET"):
        _wait_healthy(config, "http://engine", SimpleNamespace(poll=lambda: None, kill=lambda: None), tmp_path)
