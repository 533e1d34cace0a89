"""How many bytes of engines' replies this process holds at once.

Replies of long responses are large (a group of 16 x 16k tokens with K = 20 and routes is 70 MB) and many engines answer
together, while whoever decodes, scores and stores them is one process. A reply is read only while there is room for it;
until then it waits in the engine and in TCP's buffers.
"""

from __future__ import annotations

import asyncio
from collections import deque

import aiohttp

MOST_BYTES = 512 << 20


class Inflow:
    """Room for `most` bytes, given in the order in which it was asked for. Used inside one event loop.

    It counts what is being read and decoded (`Room`), and what its user says it keeps (`keep`). The latter waits for
    nothing, so the sum may come to twice `most` for a moment. One reply can always be read, whatever is kept: who keeps
    groups until another one arrives does not wait for ever.
    """

    def __init__(self, most: int = MOST_BYTES):
        self.most = most
        self.kept = 0  # bytes
        self.reading = 0  # bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def room(self) -> Room:
        """For one reply; a context manager, inside which the reply is read and decoded."""
        return Room(self)

    def keep(self, size: int) -> None:
        self.kept += size

    def give_back(self, size: int) -> None:
        """What was kept."""
        self.kept -= size
        self._admit()

    async def take(self, size: int) -> None:
        """Waits until `size` bytes may be read. `end` them."""
        if not self._waiting and self._fits(size):
            self.reading += size
            return
        entry = size, asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        try:
            await entry[1]
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._admit()  # a smaller one may stand behind it
            else:
                self.end(size)
            raise

    def end(self, size: int) -> None:
        self.reading -= size
        self._admit()

    def _fits(self, size: int) -> bool:
        return self.reading == 0 or self.reading + self.kept + size <= self.most

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            if not turn.cancelled():
                self.reading += size
                turn.set_result(None)


class Room:
    """That of one reply, or of the last of several attempts at it."""

    def __init__(self, inflow: Inflow):
        self._inflow = inflow
        self._size = 0

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    async def read(self, reply: aiohttp.ClientResponse) -> bytes | bytearray:
        """The body of a reply whose headers have come. Raises aiohttp.ClientError.

        One that does not say how long it is, as engines' replies do, or is compressed, is read without waiting.
        """
        self._leave()
        size = reply.content_length or 0
        if not size or "content-encoding" in reply.headers:
            return await reply.read()
        await self._inflow.take(size)
        self._size = size
        try:
            content, end = bytearray(size), 0  # read into place: joining pieces would need twice the memory
        except (MemoryError, OverflowError):
            raise aiohttp.ClientPayloadError(f"a reply of {size:,} bytes does not fit into memory") from None
        async for piece in reply.content.iter_any():
            content[end : end + len(piece)] = piece
            end += len(piece)
        return content

    def _leave(self) -> None:
        size, self._size = self._size, 0
        if size:
            self._inflow.end(size)
