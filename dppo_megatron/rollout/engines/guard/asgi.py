"""Check the secret, the size and the weight paths of every request, as ASGI middleware."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import Any

SECRET_VARIABLE = "DPPO_SECRET"
"""Server environment variable: the secret that requests must send as `Authorization: Bearer ...`."""
ROOTS_VARIABLE = "DPPO_WEIGHTS_ROOT"
"""Server environment variable: directories that weights may be loaded from, separated by colons."""
MAX_BODY_BYTES = 64 * 2**20  # three times our largest request, the weight plan for a large mixture of experts

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class RefusedPath(ValueError):
    """Weights may not be loaded from this path."""


class Guard:
    """Passes only requests with the secret. Protects every route except GET requests to `open_paths`.

    Requests without the secret get 401 before their body is read; requests larger than `MAX_BODY_BYTES` get 413. If
    `secret` is empty, every request is rejected. `paths` maps a route to the JSON field with the directory to load
    from. That directory must be inside `roots`. Example: `{"/update_weights_from_disk": "model_path"}`.
    """

    def __init__(
        self,
        app: App,
        *,
        secret: str,
        open_paths: Collection[str] = (),
        paths: Mapping[str, str] | None = None,
        roots: Collection[str] = (),
    ):
        self._app = app
        self._expected = f"Bearer {secret}".encode() if secret else b""
        self._open_paths = frozenset(open_paths)
        self._paths = dict(paths or {})
        self._roots = tuple(roots)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        http = scope["type"] == "http"
        if scope["type"] == "lifespan" or (http and scope["method"] == "GET" and scope["path"] in self._open_paths):
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        if not self._expected:
            reason = f"this server was started without {SECRET_VARIABLE}, so it rejects every request"
            return await _refuse(scope, send, 401, reason)
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            reason = "not authorized: send the run's secret as Authorization: Bearer ..."
            return await _refuse(scope, send, 401, reason)
        if not http:
            return await self._app(scope, receive, send)
        declared = headers.get(b"content-length", b"")
        too_large = declared.isdigit() and int(declared) > MAX_BODY_BYTES
        body = b"" if too_large else await _body(receive)
        if body is None:
            return None  # the client has disconnected
        if too_large or len(body) > MAX_BODY_BYTES:
            return await _refuse(scope, send, 413, f"a request may have at most {MAX_BODY_BYTES} bytes")
        if problem := self._path_problem(scope["path"], body):
            return await _refuse(scope, send, 400, problem)
        return await self._app(scope, _replay(body, receive), send)

    def _path_problem(self, route: str, body: bytes) -> str | None:
        field = self._paths.get(route.rstrip("/"))
        if field is None:
            return None
        try:
            value = json.loads(body)[field]
            inside_roots(value, self._roots)
        except RefusedPath as error:
            return str(error)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return f"{field}: not a path in a JSON object ({type(error).__name__})"
        return None


def inside_roots(path: str, roots: Collection[str]) -> str:
    """Return `path` with symbolic links resolved. Raises `RefusedPath` for a path outside `roots`.

    A root may contain links: a start model can be a snapshot of links into a cache. A path inside a root may contain
    only regular files and directories (`check_files`).
    """
    real = os.path.realpath(path)
    for root in map(os.path.realpath, roots):
        if os.path.commonpath((root, real)) == root:
            if real != root:
                check_files(real)
            return real
    raise RefusedPath(
        f"{path[:500]}: weights are loaded only from {', '.join(roots) or 'nowhere'} ({ROOTS_VARIABLE} and the model "
        "that this server started with)"
    )


def check_files(directory: str) -> None:
    """Raise `RefusedPath` if `directory`, or the base of a delta in it, is or contains a link or a special file.

    A reader would follow the link out of the run directory, or block on a FIFO.
    """
    visited: set[str] = set()
    while directory not in visited and os.path.isdir(directory):
        visited.add(directory)
        _, folders, files = next(os.walk(directory), ("", [], []))
        for entry in (directory, *(os.path.join(directory, name) for name in folders + files)):
            if os.path.islink(entry) or not (os.path.isfile(entry) or os.path.isdir(entry)):
                raise RefusedPath(f"{entry}: is a link or a special file; replace it with a regular file or directory")
        # The delta reader reports a damaged file.
        with contextlib.suppress(Exception), open(os.path.join(directory, "delta.json")) as file:
            directory = os.path.join(os.path.dirname(directory), os.path.basename(json.load(file)["base"]))


def roots_of_environment() -> tuple[str, ...]:
    return tuple(root for root in os.environ.get(ROOTS_VARIABLE, "").split(os.pathsep) if root)


async def _body(receive: Receive) -> bytes | None:
    """Return the body, cut off after the part that exceeds the limit, or None if the client has disconnected."""
    parts, size = [], 0
    while size <= MAX_BODY_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if not message.get("more_body", False):
            break
    return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


async def _refuse(scope: Message, send: Send, status: int, reason: str) -> None:
    if scope["type"] == "websocket":
        return await send({"type": "websocket.close", "code": 1008, "reason": ""})
    content = json.dumps({"error": reason}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    return await send({"type": "http.response.body", "body": content})
