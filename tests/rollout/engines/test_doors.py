"""Without the run's secret a client can do nothing at a server's port; with it, only what a run does."""

import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from dppo_megatron.rollout.engines.guard.asgi import MAX_BODY_BYTES
from dppo_megatron.rollout.engines.protocol import EngineIncompatible
from dppo_megatron.rollout.engines.secret import read_secret
from dppo_megatron.run.launch.evaluate import with_settings
from tests.attack import cases, generator
from tests.support.engines import PROMPT

OPEN = {"vllm": {("GET", "/health")}, "sglang": set()}
DANGEROUS = {
    "vllm": {"/dppo/load_weights", "/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache", "/v1/completions"},
    "sglang": {
        "/update_weights_from_disk",
        "/pause_generation",
        "/abort_request",
        "/flush_cache",
        "/set_internal_state",
        "/release_memory_occupation",
        "/resume_memory_occupation",
    },
}
LOADS = {
    "vllm": ("/dppo/load_weights", lambda path: {"path": path, "version": 37, "mode": "keep", "wait_s": 5.0}),
    "sglang": ("/update_weights_from_disk", lambda path: {"model_path": path, "weight_version": "37"}),
}
WRITTEN_ON_START = re.compile(r"Route: (\S+), Methods: (.*)")  # by vLLM, of every route that it has


def known(served) -> dict[str, str]:
    return {"authorization": f"Bearer {read_secret(served.config)}"}


def routes(served) -> Iterator[tuple[str, str]]:
    """(method, path) of every route of the running server."""
    found = {(method, path) for path, methods in WRITTEN_ON_START.findall(served.log.read_text())
             for method in methods.split(", ")}  # fmt: skip
    described = httpx.get(f"{served.url}/openapi.json", headers=known(served), timeout=30).json()["paths"]
    found |= {(method.upper(), path) for path, methods in described.items() for method in methods}
    found |= {("GET", path) for path in ("/openapi.json", "/docs", "/metrics", "/health", "/ready", "/nowhere", "/")}
    return iter(sorted(found))


def unchanged(served) -> None:
    """It serves the start policy, with its weights."""

    async def look(engine):
        return (await engine.info()).version, await engine.score(PROMPT)

    version, scores = served.use(look)
    assert version == 0
    assert abs(scores - served.reference("a").score(PROMPT)).max() < 1e-4


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer another"}], ids=["none", "another"])
def test_every_route_needs_the_secret(served, headers):
    tried = 0
    assert DANGEROUS[served.kind] <= {path for _, path in routes(served)}
    with httpx.Client(base_url=served.url, headers=headers, timeout=30, trust_env=False) as client:
        for method, path in routes(served):
            if (method, path) in OPEN[served.kind]:
                continue
            reply = client.request(method, path.replace("{", "").replace("}", ""), content=b"{}")
            assert reply.status_code == 401, (method, path, reply.text)
            tried += 1
    assert tried > 30, "the server lists fewer routes than it has"
    unchanged(served)


def test_a_client_of_another_run_is_refused_with_the_reason(served, tmp_path):
    (tmp_path / "secret").write_text("of another run")
    other = with_settings(served.config, engine={"secret_file": tmp_path / "secret"})
    with pytest.raises(EngineIncompatible, match=r"status 401: .*it has another secret than this run"):
        served.use(lambda engine: engine.load_weights(served.models["b"], 1), other)
    unchanged(served)


def test_weights_from_outside_the_run_are_refused(served):
    path, body = LOADS[served.kind]
    with tempfile.TemporaryDirectory(dir="/tmp") as elsewhere:
        shutil.copytree(served.models["b"], Path(elsewhere, "b"))
        link = served.models["b"].parent / "link"
        link.symlink_to(Path(elsewhere, "b"))
        for source in (Path(elsewhere, "b"), link, served.models["b"] / ".." / "link"):
            reply = httpx.post(served.url + path, headers=known(served), json=body(str(source)), timeout=30)
            assert reply.status_code == 400
            assert "weights are loaded only from" in reply.json()["error"]
        link.unlink()
    unchanged(served)


def test_a_request_that_is_too_large_is_refused_before_it_is_sent(served):
    """Every route checks the declared size, and counts the bytes of a body that declares none."""
    host, port = served.url.removeprefix("http://").split(":")
    for method, path in routes(served):
        head = f"{method} {path.replace('{', '').replace('}', '')} HTTP/1.1\r\nhost: x\r\n"
        head += f"authorization: {known(served)['authorization']}\r\ncontent-length: {MAX_BODY_BYTES + 1}\r\n\r\n"
        if method != "POST":
            continue
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(head.encode())
            reply = b"".join(iter(lambda: connection.recv(4096), b""))
        assert b" 413 " in reply.partition(b"\r\n")[0], (path, reply)
        assert f"at most {MAX_BODY_BYTES} bytes".encode() in reply
    path, _ = LOADS[served.kind]
    parts = iter([bytes(2**20)] * (MAX_BODY_BYTES // 2**20 + 1))
    reply = httpx.post(served.url + path, headers=known(served), content=parts, timeout=60)
    assert reply.status_code == 413
    unchanged(served)


def test_malformed_requests_end_nothing(served):
    """They go to the routes that this program uses. SGLang answers in its own way, and keeps serving."""
    paths = [path for method, path in routes(served) if path.startswith("/dppo/") and method == "POST"]
    paths = [path for path in paths if path not in ("/dppo/sleep", "/dppo/wake")] or [
        *("/generate", "/update_weights_from_disk", "/update_weight_version", "/init_weights_update_group"),
        *("/update_weights_from_distributed", "/abort_request"),
    ]
    with httpx.Client(base_url=served.url, headers=known(served), timeout=30, trust_env=False) as client:
        for case in range(cases(60)):
            draw = generator("route", case)
            body = draw.choice((b"", b"null", b"[]", b"{", b"[" * 50_000, b"\xff", draw.randbytes(64), b'{"n": 1e999}'))
            path = draw.choice(paths)
            reply = client.post(path, content=body, headers={"content-type": "application/json"})
            assert 400 <= reply.status_code < 500, (path, body[:80], reply.text[:500])
            assert "Traceback" not in reply.text
    unchanged(served)


def test_the_secret_is_only_in_its_file(served):
    secret = read_secret(served.config)
    run = served.config.run.dir
    for path in (p for p in (*run.rglob("*"), served.log) if p.is_file() and p != run / "secret"):
        assert secret.encode() not in path.read_bytes(), path
    for process in psutil.process_iter(["cmdline"]):
        assert secret not in " ".join(process.info["cmdline"] or ()), process


def test_no_process_of_the_server_listens_beyond_the_loopback_interface(served):
    """The store by which its workers find each other, too."""
    port = int(served.url.rpartition(":")[2])
    (pid,) = {c.pid for c in psutil.net_connections() if c.status == "LISTEN" and c.laddr.port == port}
    server = psutil.Process(pid)
    processes = [server, *server.children(recursive=True)]
    listening = [c.laddr.ip for p in processes for c in p.net_connections() if c.status == "LISTEN"]
    assert len(processes) > 1
    assert set(listening) == {"127.0.0.1"}
