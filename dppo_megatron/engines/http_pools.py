"""Many concurrent HTTP requests to one server."""

from __future__ import annotations

import httpx

REQUESTS_PER_POOL = 8
JSON = {"content-type": "application/json"}
IDLE_CONNECTION_S = 4.0  # below uvicorn's default of 5: a reused connection is never one the server just closed


class HttpPools:
    """httpx clients for `url`, opened as concurrency grows.

    httpx looks at every connection of a pool for every request, which at hundreds of connections costs more than the
    requests; a few connections in each of many pools do not. No timeouts of its own: bound the call.
    """

    def __init__(self, url: str):
        self._url = url
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
                timeout=None,
                limits=httpx.Limits(max_connections=None, keepalive_expiry=IDLE_CONNECTION_S),
                verify=self._tls,
                trust_env=False,  # engines are peers of this process; a web proxy is never between them
            )
        )
        self._running.append(0)
        return len(self._pools) - 1
