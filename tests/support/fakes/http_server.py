"""Fakes a server with canned replies, silence and closed connections."""

import asyncio

from dppo_megatron.rollout.engines.kinds import build_engine


def http(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


class Last(bytes):
    """Marks a reply after which the server closes the connection."""


async def read_request(reader) -> str | None:
    """Read the next request with its body, and return the path; None at the end of the connection."""
    if not (line := await reader.readline()):
        return None
    headers = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"content-length:" in headers:
        await reader.readexactly(int(headers.split(b"content-length:")[1].split()[0]))
    return line.split()[1].decode()


def against(config, replies, use, unused=None):
    """Return the result of `use` on a client of a server that answers each path with `replies[path]`, in order.

    With the reply None the server stays silent; with empty bytes it closes the connection. Paths with remaining replies
    are added to the list `unused`.
    """
    replies = {path: list(each) for path, each in replies.items()}

    async def answer(reader, writer):
        try:
            while path := await read_request(reader):
                reply = replies[path].pop(0)
                if reply is None:
                    await asyncio.sleep(60)
                writer.write(reply)
                await writer.drain()
                if not reply or isinstance(reply, Last):
                    break
        finally:
            writer.close()

    async def main():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        engine = build_engine(config, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            async with asyncio.timeout(20):
                return await use(engine)
        finally:
            await engine.close()
            server.close()
            if unused is not None:
                unused.extend(path for path, left in replies.items() if left)

    return asyncio.run(main())
