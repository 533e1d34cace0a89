"""Limit how many bytes of engine replies this process buffers at a time.

Replies with long responses are large: a group of 16 x 16k tokens with K = 20 and routes has 70 MB. Many engines answer
at the same time, but a single process decodes, scores and stores their replies. This process reads a reply only when
the reply fits the limit. Until then the reply waits in the engine and in TCP's buffers.
"""

from __future__ import annotations

import asyncio
from collections import deque

import aiohttp

MAX_BYTES = 512 << 20


class ByteBudget:
    """Grants at most `limit` bytes, in the order of the requests. Use it inside a single event loop.

    The budget counts replies that are being read and decoded (`ReplySlot`) and finished groups that the user keeps
    (`charge`). Charging never waits, so the sum may briefly reach twice `limit`. While no reply is being read, the next
    reply is admitted even over the limit. A user that keeps groups until another group arrives therefore cannot
    deadlock the reader.

    Example: with limit 100 and 80 charged, a reply of 30 is read at once if no other reply is being read. Otherwise it
    waits for a `refund`.
    """

    def __init__(self, limit: int = MAX_BYTES):
        self.limit = limit
        self.charged = 0  # bytes that the user keeps
        self.reserved = 0  # bytes of replies that are being read or decoded
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def charge(self, size: int) -> None:
        self.charged += size

    def refund(self, size: int) -> None:
        """Subtract `size` bytes that were added by `charge`, and admit waiting replies."""
        self.charged -= size
        self._admit()

    async def reserve(self, size: int) -> None:
        """Wait until `size` bytes may be read. The caller must `release` them afterwards."""
        if not self._waiting and self._fits(size):
            self.reserved += size
            return
        entry = size, asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        try:
            await entry[1]
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._admit()  # a smaller request after it may fit
            else:
                self.release(size)
            raise

    def release(self, size: int) -> None:
        self.reserved -= size
        self._admit()

    def _fits(self, size: int) -> bool:
        return self.reserved == 0 or self.reserved + self.charged + size <= self.limit

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            if not turn.cancelled():
                self.reserved += size
                turn.set_result(None)


class ReplySlot:
    """Reserves bytes for a reply that is read and decoded in this context. A retry reserves the bytes again."""

    def __init__(self, budget: ByteBudget):
        self._budget = budget
        self._size = 0

    def __enter__(self) -> ReplySlot:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    async def read(self, reply: aiohttp.ClientResponse) -> bytes | bytearray:
        """Return the body of a reply after its headers have arrived. Raises aiohttp.ClientError.

        A reply that is compressed or has no declared length is read without waiting. Our engines send no such replies.
        """
        self._release()
        size = reply.content_length or 0
        if not size or "content-encoding" in reply.headers:
            return await reply.read()
        await self._budget.reserve(size)
        self._size = size
        try:
            content, end = bytearray(size), 0  # joining chunks would need twice the memory
        except (MemoryError, OverflowError):
            raise aiohttp.ClientPayloadError(f"a reply of {size:,} bytes does not fit into memory") from None
        async for chunk in reply.content.iter_any():
            content[end : end + len(chunk)] = chunk
            end += len(chunk)
        return content

    def _release(self) -> None:
        size, self._size = self._size, 0
        if size:
            self._budget.release(size)
