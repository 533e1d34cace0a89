"""Send messages between the pool and a worker, over a socket that foreign code may write to.

A message is the worker's token, the message length and the message bytes. Any other data terminates the worker: bytes
without the token, too many bytes, or JSON that is not a reply. Worker replies are never unpickled. Example: the reply
b"{}" is 16 bytes of token, the length 0, 0, 0, 2, and the 2 bytes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

from .deadline import Deadline

TOKEN_BYTES = 16
LARGEST_REPLY = 64 * 1024  # bytes
_LENGTH = struct.Struct(">I")
_HEAD = TOKEN_BYTES + _LENGTH.size


class InvalidReply(ConnectionError):
    """The channel received bytes that this package's worker code did not write."""


class WorkerChannel:
    """Sends and receives at one end. A call raises `TimeoutError` at its deadline, or never without a deadline.

    Raises `EOFError` or `OSError` when the other end has closed the channel.
    """

    def __init__(self, end: socket.socket, token: bytes):
        self._end = end
        self._token = token

    def send(self, payload: bytes, deadline: Deadline | None = None) -> None:
        unsent = memoryview(self._token + _LENGTH.pack(len(payload)) + payload)
        while unsent:
            with self._waiting(deadline):
                unsent = unsent[self._end.send(unsent) :]

    def receive(self, deadline: Deadline | None = None, largest: int | None = None) -> bytes:
        """Return the next message. Raises `InvalidReply` if it has no token or more than `largest` bytes."""
        head = b""
        while len(head) < _HEAD:
            head += self._read(_HEAD - len(head), deadline)
            if not self._token.startswith(head[:TOKEN_BYTES]):
                raise InvalidReply(f"expected a reply, got {head[:TOKEN_BYTES]!r}")
        (size,) = _LENGTH.unpack(head[TOKEN_BYTES:])
        if largest is not None and size > largest:
            raise InvalidReply(f"the reply has {size} bytes, more than {largest}")
        parts = []
        while size:
            parts.append(self._read(min(size, 1 << 20), deadline))
            size -= len(parts[-1])
        return b"".join(parts)

    def receive_reply(self, deadline: Deadline, number: int, largest: int = LARGEST_REPLY) -> dict[str, Any]:
        """Return the reply to request `number`. Raises the same errors as `receive`."""
        payload = self.receive(deadline, largest)
        try:
            reply = json.loads(payload)
        except (ValueError, RecursionError):
            raise InvalidReply("the reply is not JSON") from None
        if not isinstance(reply, dict) or reply.get("number") != number:
            raise InvalidReply("the reply is for a different request")
        return reply

    @property
    def quiet(self) -> bool:
        """Return whether the other end is open and has sent no unrequested bytes."""
        self._end.settimeout(0)
        try:
            self._end.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # unrequested bytes, or end of stream

    def close(self) -> None:
        self._end.close()

    def _read(self, size: int, deadline: Deadline | None) -> bytes:
        part: bytes | None = None
        while part is None:
            with self._waiting(deadline):
                part = self._end.recv(size)
        if not part:
            raise EOFError("it closed its end")
        return part

    @contextlib.contextmanager
    def _waiting(self, deadline: Deadline | None) -> Iterator[None]:
        """Let a socket call in the body end without a result when the deadline must be counted."""
        self._end.settimeout(None if deadline is None else deadline.tick())
        with contextlib.suppress(TimeoutError):
            yield
