"""Send HTTP requests to one engine server, with timeouts and retries; every failure becomes an `EngineError`."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from typing import Any, TypeVar

import aiohttp
import certifi
from yarl import URL

from dppo_megatron.common.deadline import time_limit

from .byte_budget import ReplySlot
from .protocol import EngineError, EngineIncompatible, EngineRefused, EngineTimeout, EngineUnavailable

T = TypeVar("T")
CONTROL_TIMEOUT_S = 30.0  # limit for requests that an engine answers at once, even under load
REQUEST_TIMEOUT_REMEDY = (
    " (engine.request_timeout_s, waiting in the engine's queue included); raise it, add engines, or lower "
    "rollout.max_concurrent_groups"
)
OTHER_SECRET = (
    "it has another secret than this run: the server's DPPO_SECRET must be the content of engine.secret_file, by "
    "default RUN/secret"
)
NO_SECRET = "this process sends none: RUN/secret does not exist, or this user cannot read it; see engine.secret_file"
RETRY_BUSY_S = (0.05, 1.0)  # first and longest wait after "503, try again"
JSON = {"content-type": "application/json"}
SMALL_REPLY_BYTES = 64 << 10  # a reply of this size is decoded faster than a thread starts
IDLE_CONNECTION_S = 4.0  # below uvicorn's default of 5, so the server never closes a connection that is just reused


async def decoded(decode: Callable[..., T], reply: bytes | bytearray, *arguments: Any) -> T:
    """Return decode(reply, *arguments), computed in a thread if the reply is large.

    Decoding the top-K log-probs for a group of long responses takes a third of a second.
    """
    if len(reply) <= SMALL_REPLY_BYTES:
        return decode(reply, *arguments)
    return await asyncio.to_thread(decode, reply, *arguments)


class EngineCalls:
    """Calls the server at `url` with the run's `secret`. Each running request has a separate connection.

    The first request binds it to the running event loop. Errors about a missing route end with the remedy
    `unknown_route`.
    """

    def __init__(self, url: str, secret: str | None, unknown_route: str):
        self.url = url.rstrip("/")
        self._unknown_route = unknown_route
        self._unknown_secret = OTHER_SECRET if secret else NO_SECRET
        self._headers = {"authorization": f"Bearer {secret}"} if secret else {}
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self,
        action: str,
        path: str,
        timeout_s: float = CONTROL_TIMEOUT_S,
        *,
        content: bytes | None = None,
        body: dict[str, Any] | None = None,
        retry_busy: bool = True,
        timeout_remedy: str = "",
        slot: ReplySlot | None = None,
    ) -> bytes | bytearray:
        """Send a request, and return the body of the 200 reply. The request is a POST if it has a body, else a GET.

        `action` names the operation in errors. The timeout error ends with `timeout_remedy`. With `slot` the reply is
        read only when it fits the byte budget.
        """
        content = json.dumps(body).encode() if body is not None else content
        wait = RETRY_BUSY_S[0]
        try:
            async with time_limit(timeout_s):
                while True:
                    status, reply = await self._request("GET" if content is None else "POST", path, content, slot)
                    # Servers refuse new requests for a moment while they are paused or their queue is full.
                    if status != 503 or not retry_busy:
                        break
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, RETRY_BUSY_S[1])
        except TimeoutError:
            raise EngineTimeout(
                f"engine {self.url}: no answer within {timeout_s:g} s to {action}{timeout_remedy}"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            if isinstance(error, aiohttp.ClientConnectorError):
                reason += "; start that engine, or correct its URL"
            raise EngineUnavailable(f"engine {self.url}: connection failed during {action}: {reason}") from None
        if status == 200:
            return reply
        raise self._failure(action, status, reply)

    async def json(self, action: str, path: str, timeout_s: float = CONTROL_TIMEOUT_S, **call: Any) -> dict[str, Any]:
        """Return the JSON object in a 200 reply. Raises `EngineError` for anything else."""
        reply = await self.call(action, path, timeout_s, **call)
        try:
            parsed = json.loads(reply)
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            raise EngineError(f"engine {self.url}: {action}: garbled reply: {reply[:200]!r}")
        return parsed

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _request(
        self, method: str, path: str, content: bytes | None = None, slot: ReplySlot | None = None
    ) -> tuple[int, bytes | bytearray]:
        """Send a request and return the reply's status and whole body. `slot`, if given, reads the body of a 200 reply.

        `content` is JSON. This method has no timeout. Raises aiohttp.ClientError and OSError.
        """
        if self._session is None:
            self._session = self._open()
        url = URL(self.url + path, encoded=True)
        headers = None if content is None else JSON
        async with self._session.request(method, url, data=content, headers=headers, allow_redirects=False) as reply:
            body = reply.read() if slot is None or reply.status != 200 else slot.read(reply)
            return reply.status, await body

    def _open(self) -> aiohttp.ClientSession:
        tls = ssl.create_default_context(cafile=certifi.where()) if self.url.startswith("https") else True
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=IDLE_CONNECTION_S, ssl=tls, resolver=aiohttp.ThreadedResolver()
        )
        return aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,  # engines are peers of this process; requests to them must never pass a web proxy
        )

    def _failure(self, action: str, status: int, content: bytes | bytearray) -> EngineError:
        message = f"engine {self.url}: {action} failed with status {status}: {_reason(content)}"
        if status == 404:
            return EngineIncompatible(f"{message} ({self._unknown_route})")
        if status in (401, 403):
            return EngineIncompatible(f"{message} ({self._unknown_secret})")
        if status == 504:
            return EngineTimeout(message)
        if status == 503:
            return EngineUnavailable(message)
        return EngineRefused(message) if status in (400, 413, 422) else EngineError(message)


def _reason(content: bytes | bytearray) -> str:
    """Return the error text in a reply.

    The formats are `{"error": text}` (vLLM with our routes), `{"error": {"message": text}}` and `{"message": text}`.
    """
    try:
        error = json.loads(content)
        error = error.get("error", error)
        return error if isinstance(error, str) else str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return content.decode(errors="replace")[:300]
