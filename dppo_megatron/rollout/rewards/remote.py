"""Query a reward model or a judge over HTTP. A request has a batch of responses to a prompt, and is retried."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from dppo_megatron.common.deadline import time_limit
from dppo_megatron.common.retry import RetryBudget, retry_async
from dppo_megatron.types import Prompt

_JSON = {"Content-Type": "application/json"}
_LARGEST_REPLY = 16 * 1024 * 1024  # bytes


class RemoteError(RuntimeError):
    """The server returned no rewards."""


class Retriable(RemoteError):
    """A later request may succeed."""


class RemoteReward:
    """Requests rewards: POSTs `{"prompt", "messages", "answer", "data_source", "responses": [...]}` to `url`.

    The reply must be `{"rewards": [number or null, ...]}`, with null for a response without a reward. Example for 2
    responses: `{"rewards": [1.0, null]}`.

    batch: most responses in a request.
    attempts: how many times a request is sent at most, if it fails with 408, 425, 429 or 5xx, or gets no answer.
        reward.timeout_s limits all attempts together.
    token_env: environment variable with the bearer token.
    columns: row columns that are sent too.
    """

    def __init__(
        self, url: str, *, batch: int = 64, attempts: int = 4, token_env: str | None = None, columns: Sequence[str] = ()
    ):
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ValueError(f"url = {url!r}: must be http://HOST:PORT/PATH")
        if batch < 1 or attempts < 1:
            raise ValueError(f"batch = {batch}, attempts = {attempts}: both must be at least 1")
        if token_env is not None and token_env not in os.environ:
            raise ValueError(f"token_env = {token_env!r}: the environment has no such variable")
        if token_env is not None and not (os.environ[token_env].isascii() and os.environ[token_env].isprintable()):
            # aiohttp would name the header in its error, and the log would contain it.
            raise ValueError(f"token_env = {token_env!r}: must be one line of ASCII")
        self._url, self._batch, self._token_env, self._columns = url, batch, token_env, tuple(columns)
        self._budget = RetryBudget(attempts=attempts, first_pause_s=0.2, longest_pause_s=5.0, jitter=True)

    async def score_group(self, prompt: Prompt, texts: Sequence[str], timeout_s: float) -> list[float | None]:
        """Return the rewards of all texts. Raises `RemoteError`, and `TimeoutError` after `timeout_s`."""
        headers = {} if self._token_env is None else {"Authorization": f"Bearer {os.environ[self._token_env]}"}
        parts = [texts[i : i + self._batch] for i in range(0, len(texts), self._batch)]
        # Without trust_env, requests to a cluster's judge bypass proxies.
        session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(None))
        async with time_limit(timeout_s), session as client:
            replies = await asyncio.gather(*(self._ask(client, prompt, part) for part in parts))
        return [reward for reply in replies for reward in reply]

    async def _ask(self, client: aiohttp.ClientSession, prompt: Prompt, texts: Sequence[str]) -> list[float | None]:
        row_prompt = prompt.columns.get("prompt")
        body = {
            "prompt": prompt.text,
            "messages": row_prompt if isinstance(row_prompt, list) else None,
            "answer": prompt.answer,
            "data_source": prompt.source,
            "responses": list(texts),
            **{name: prompt.columns.get(name) for name in self._columns},
        }
        content = json.dumps(body, default=str).encode()

        async def post(_attempt: int) -> bytes:
            try:
                async with client.post(self._url, data=content, headers=_JSON, allow_redirects=False) as response:
                    return await _read(response)
            except aiohttp.ClientError as error:
                raise Retriable(f"{self._url}: {type(error).__name__}: {error}") from error

        return _rewards(await retry_async(post, self._budget, on=Retriable), len(texts), self._url)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    reply = b""
    async for part in response.content.iter_any():
        reply += part
        if len(reply) > _LARGEST_REPLY:
            raise RemoteError(f"{response.url}: a reply of more than {_LARGEST_REPLY} bytes")
    if response.status == 200:
        return reply
    kind = Retriable if response.status in (408, 425, 429) or response.status >= 500 else RemoteError
    raise kind(f"{response.url}: status {response.status}: {reply[:200]!r}")


def _rewards(reply: bytes, count: int, url: str) -> list[Any]:
    try:
        rewards = json.loads(reply)["rewards"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RemoteError(f'{url}: the reply is not {{"rewards": [...]}}: {reply[:200]!r}') from None
    if not isinstance(rewards, list) or len(rewards) != count:
        raise RemoteError(f"{url}: {count} responses were sent, the reply has {len(rewards)} rewards")
    return rewards
