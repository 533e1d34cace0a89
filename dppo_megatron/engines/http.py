"""HTTP to one engine server: bounded in time, repeated while it is busy, every failure an `EngineError`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from .protocol import EngineError, EngineIncompatible, EngineRefused, EngineTimeout, EngineUnavailable

CONTROL_TIMEOUT_S = 30.0  # requests an engine answers at once, even under load
REQUEST_TIMEOUT_REMEDY = (
    " (engine.request_timeout_s, waiting in the engine's queue included); raise it, add engines, or lower "
    "rollout.max_concurrent_groups"
)
OTHER_SECRET = (
    "it has another secret than this run: what is in engine.secret_file, by default RUN/secret, must be the "
    "server's DPPO_SECRET"
)
NO_SECRET = "this process brought none: RUN/secret is not there, or not for this user to read; see engine.secret_file"
RETRY_BUSY_S = (0.05, 1.0)  # first and longest wait after "503, try again"
REQUESTS_PER_POOL = 8
JSON = {"content-type": "application/json"}
IDLE_CONNECTION_S = 4.0  # below uvicorn's default of 5: a reused connection is never one the server just closed


class EngineCalls:
    """HTTP to the server at `url`, with the run's `secret`. `unknown_route` is the remedy when it lacks a route."""

    def __init__(self, url: str, secret: str | None, unknown_route: str):
        self.url = url.rstrip("/")
        self._unknown_route = unknown_route
        self._unknown_secret = OTHER_SECRET if secret else NO_SECRET
        self._http = HttpPools(self.url, secret)

    async def call(
        self,
        what: str,
        path: str,
        timeout_s: float = CONTROL_TIMEOUT_S,
        *,
        content: bytes | None = None,
        body: dict[str, Any] | None = None,
        retry_busy: bool = True,
        timeout_remedy: str = "",
    ) -> bytes:
        """Body of a 200 reply; POST when there is something to send. `what` names the operation in errors, of which
        one for the time-out ends in `timeout_remedy`."""
        content = json.dumps(body).encode() if body is not None else content
        wait = RETRY_BUSY_S[0]
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    reply = await self._http.request("GET" if content is None else "POST", path, content)
                    # Servers refuse new requests for a moment while they are paused or their queue is full.
                    if reply.status_code != 503 or not retry_busy:
                        break
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, RETRY_BUSY_S[1])
        except TimeoutError:
            raise EngineTimeout(
                f"engine {self.url}: no answer within {timeout_s:g} s to {what}{timeout_remedy}"
            ) from None
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise EngineUnavailable(f"engine {self.url}: connection failed during {what}: {reason}") from None
        if reply.status_code == 200:
            return reply.content
        raise self._failure(what, reply)

    async def json(self, what: str, path: str, timeout_s: float = CONTROL_TIMEOUT_S, **call: Any) -> dict[str, Any]:
        """The JSON object of a 200 reply. Raises `EngineError` for anything else."""
        reply = await self.call(what, path, timeout_s, **call)
        try:
            parsed = json.loads(reply)
        except ValueError as error:
            raise EngineError(f"engine {self.url}: {what}: garbled reply: {reply[:200]!r}") from error
        if not isinstance(parsed, dict):
            raise EngineError(f"engine {self.url}: {what}: garbled reply: {reply[:200]!r}")
        return parsed

    async def close(self) -> None:
        await self._http.close()

    def _failure(self, what: str, reply: httpx.Response) -> EngineError:
        message = f"engine {self.url}: {what} failed with status {reply.status_code}: {_reason(reply)}"
        if reply.status_code == 404:
            return EngineIncompatible(f"{message} ({self._unknown_route})")
        if reply.status_code in (401, 403):
            return EngineIncompatible(f"{message} ({self._unknown_secret})")
        if reply.status_code == 504:
            return EngineTimeout(message)
        if reply.status_code == 503:
            return EngineUnavailable(message)
        return EngineRefused(message) if reply.status_code in (400, 413, 422) else EngineError(message)


def _reason(reply: httpx.Response) -> str:
    """The reason in the reply: `{"error": text}` (vLLM with our routes), `{"error": {"message"}}` or `{"message"}`."""
    try:
        error = reply.json()
        error = error.get("error", error)
        return error if isinstance(error, str) else str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return reply.text[:300]


class HttpPools:
    """httpx clients for `url`, opened as concurrency grows; they bring `secret`.

    httpx looks at every connection of a pool for every request, which at hundreds of connections costs more than the
    requests; a few connections in each of many pools do not. No timeouts of its own: bound the call.
    """

    def __init__(self, url: str, secret: str | None):
        self._url = url
        self._headers = {"authorization": f"Bearer {secret}"} if secret else {}
        self._tls = httpx.create_ssl_context(trust_env=False)
        self._pools: list[httpx.AsyncClient] = []
        self._running: list[int] = []  # requests in each pool

    async def request(self, method: str, path: str, content: bytes | None = None) -> httpx.Response:
        """The whole reply, whatever its status. `content` is JSON. Raises httpx.TransportError."""
        index = self._choose()
        self._running[index] += 1
        try:
            return await self._pools[index].request(method, path, content=content, headers=JSON if content else None)
        finally:
            self._running[index] -= 1

    async def close(self) -> None:
        for pool in self._pools:
            await pool.aclose()

    def _choose(self) -> int:
        for index, running in enumerate(self._running):
            if running < REQUESTS_PER_POOL:
                return index
        self._pools.append(
            httpx.AsyncClient(
                base_url=self._url,
                headers=self._headers,
                timeout=None,
                limits=httpx.Limits(max_connections=None, keepalive_expiry=IDLE_CONNECTION_S),
                verify=self._tls,
                trust_env=False,  # engines are peers of this process; a web proxy is never between them
            )
        )
        self._running.append(0)
        return len(self._pools) - 1
