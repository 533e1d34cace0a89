"""Serve agents over HTTP: find the session by key, and pass the request to the conversation."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from aiohttp import web

from dppo_megatron.config.section import host_and_port
from dppo_megatron.errors import ExpectedError
from dppo_megatron.rollout.environments.conversation import Conversation, RequestRejected, Turn, TurnRequest

from . import chat, messages, responses
from .interface import KNOWN, MODEL, TYPES, Body, Interface

INTERFACES: tuple[Interface, ...] = (chat, responses, messages)
LARGEST_REQUEST = 64 << 20  # bytes
HUNG_UP = 499  # the client never receives it; an exception would fill the orchestrator's log
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, RecursionError)


@dataclass
class _Session:
    conversation: Conversation
    # Turns that are being sampled -> (turn request, HTTP request that gets the reply).
    running: dict[asyncio.Task[Turn], tuple[TurnRequest, web.Request]] = field(default_factory=dict)

    def asking(self, ask: TurnRequest, request: web.Request) -> asyncio.Task[Turn]:
        """Return the running turn if a disconnected client sent an equal request, else start a new turn."""
        abandoned_tasks = (
            task
            for task, (turn_request, http_request) in self.running.items()
            if turn_request == ask and _gone(http_request)
        )
        task = next(abandoned_tasks, None) or asyncio.create_task(self.conversation.ask(ask))
        self.running[task] = ask, request
        return task


class Gateway:
    """Listens on a free port of `host` while it is open as an asynchronous context manager.

    A secret key identifies a session: in `Authorization: Bearer`, in `x-api-key`, or in the URL as /sessions/KEY/v1/...
    Without a key every route returns 401, even on loopback.
    """

    def __init__(self, host: str):
        self._host = host
        self._sessions: dict[str, _Session] = {}
        app = web.Application(client_max_size=LARGEST_REQUEST)
        for place in ("", "/sessions/{key}"):
            app.router.add_get(f"{place}/v1/models", self._models)
            for interface in INTERFACES:
                app.router.add_post(place + interface.PATH, partial(self._answer, interface))
        app.router.add_route("*", "/{path:.*}", self._unknown)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        self.url = ""

    async def __aenter__(self) -> Gateway:
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0)
        try:
            await site.start()
        except OSError as error:
            raise ExpectedError(
                f"environment.host = {self._host}: {error.strerror}; give an address of this machine"
            ) from None
        self.url = f"http://{host_and_port(self._host, self._runner.addresses[0][1])}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @asynccontextmanager
    async def session(self, conversation: Conversation) -> AsyncIterator[str]:
        """Yield the key for requests to the conversation. On exit, wait until all requests are answered."""
        key = secrets.token_urlsafe(24)
        session = self._sessions[key] = _Session(conversation)
        try:
            yield key
        except BaseException:
            for task in session.running:
                task.cancel()
            raise
        finally:
            del self._sessions[key]
        await asyncio.gather(*session.running, return_exceptions=True)

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request, chat)
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _unknown(self, request: web.Request) -> web.Response:
        self._session(request, chat)
        remedy = "set the base URL of OpenAI's client to url/v1, of Anthropic's to url"
        return web.json_response(chat.error(f"{request.path}: no such route; {remedy}", 404), status=404)

    async def _answer(self, interface: Interface, request: web.Request) -> web.StreamResponse:
        session = self._session(request, interface)
        try:
            body = await request.json()
            for name, value in body.items():
                values, is_known_field = interface.SERVED.get(name, ()), name in KNOWN or name in interface.READ
                is_served = isinstance(value, TYPES.get(name, object)) if is_known_field else value in values
                if value is not None and not is_served:
                    raise RequestRejected(f"{name} = {json.dumps(value)[:100]}: not supported; correct or omit it")
            ask = interface.read(body)
        except RequestRejected as rejection:
            return _error(interface, str(rejection))
        except MALFORMED as error:
            return _error(interface, f"not a request of {interface.PATH}: {type(error).__name__}: {error}")
        task = session.asking(ask, request)
        try:
            turn = await task
        except RequestRejected as rejection:
            return _error(interface, str(rejection))
        finally:
            if is_current := session.running[task][1] is request:  # not current: a repeated request gets the reply
                del session.running[task]
        if not is_current:
            return web.Response(status=HUNG_UP)
        try:
            return await _send(interface, request, turn, body)
        except ConnectionError:
            session.conversation.hung_up(turn)
            return web.Response(status=HUNG_UP)

    def _session(self, request: web.Request, interface: Interface) -> _Session:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        for key in (request.match_info.get("key"), request.headers.get("x-api-key"), bearer):
            if key in self._sessions:
                return self._sessions[key]
        message = "no such session: send the key that the agent was called with, as API key or in the URL"
        raise web.HTTPUnauthorized(text=json.dumps(interface.error(message, 401)), content_type="application/json")


async def _send(interface: Interface, request: web.Request, turn: Turn, body: Body) -> web.StreamResponse:
    """Send the reply. Raises ConnectionError if the client has disconnected."""
    if _gone(request):
        raise ConnectionResetError
    if not body.get("stream"):
        reply = web.json_response(interface.reply(turn, body))
        await reply.prepare(request)
        await reply.write_eof()
        return reply
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await stream.prepare(request)
    for event in interface.events(turn, body):
        name = f"event: {event['type']}\n" if "type" in event else ""
        await stream.write(f"{name}data: {json.dumps(event)}\n\n".encode())
    if interface is chat:
        await stream.write(b"data: [DONE]\n\n")
    await stream.write_eof()
    return stream


def _gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _error(interface: Interface, message: str) -> web.Response:
    return web.json_response(interface.error(message, 400), status=400)
