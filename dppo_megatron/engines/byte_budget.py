"""The limit on the bytes of engines' replies that this process holds at once.

Replies of long responses are large (a group of 16 x 16k tokens with K = 20 and routes is 70 MB) and many engines answer
together, but one process decodes, scores and stores them. A reply is read only when it fits the limit; until then it
waits in the engine and in TCP's buffers.
"""

from __future__ import annotations

import asyncio
from collections import deque

import aiohttp

MOST_BYTES = 512 << 20


class ByteBudget:
    """A limit of `limit` bytes, granted in the order of the requests. Used inside one event loop.

    It counts replies that are being read and decoded (`ReplySlot`) and finished groups that its user keeps (`charge`).
    Charging never waits, so the sum may briefly reach twice `limit`. One reply is always admitted, even over the limit:
    a user that keeps groups until another one arrives cannot deadlock the reader.

    Limit 100, charged 80: a reply of 30 is read at once if no other reply is, and otherwise waits for a `refund`.
    """

    def __init__(self, limit: int = MOST_BYTES):
        self.limit = limit
        self.charged = 0  # bytes that the user keeps
        self.reserved = 0  # bytes of replies that are being read or decoded
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def charge(self, size: int) -> None:
        self.charged += size

    def refund(self, size: int) -> None:
        """Take back a `charge`."""
        self.charged -= size
        self._admit()

    async def reserve(self, size: int) -> None:
        """Wait until `size` bytes may be read; `release` them afterwards."""
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
                self._admit()  # a smaller request behind it may fit
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
    """Context manager inside which one reply, or the last of several attempts at it, is read and decoded."""

    def __init__(self, budget: ByteBudget):
        self._budget = budget
        self._size = 0

    def __enter__(self) -> ReplySlot:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    async def read(self, reply: aiohttp.ClientResponse) -> bytes | bytearray:
        """Return the body of a reply whose headers have arrived. Raises aiohttp.ClientError.

        A reply without a declared length, unlike those of engines, or with compression is read without waiting.
        """
        self._release()
        size = reply.content_length or 0
        if not size or "content-encoding" in reply.headers:
            return await reply.read()
        await self._budget.reserve(size)
        self._size = size
        try:
            content, end = bytearray(size), 0  # read into place: joining chunks would need twice the memory
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
