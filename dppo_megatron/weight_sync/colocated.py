"""Colocated engines and trainer use the same GPUs in turn: one sleeps or is offloaded while the other works."""

from __future__ import annotations

import logging
from contextlib import ExitStack

from dppo_megatron.actor import Actor

from .engine_thread import EngineThread
from .errors import WeightSyncError

log = logging.getLogger(__name__)


def put_to_sleep(engines: EngineThread) -> None:
    """Has every engine that answers free its GPU memory. Raises `WeightSyncError` naming those that did not."""

    async def sleep(live) -> list[str]:
        answering, _ = await live.answering()
        replies = await live.on(answering, lambda engine: engine.sleep())
        return [str(reply) for reply in replies.values() if isinstance(reply, Exception)]

    if awake := engines.start(sleep).result():
        raise WeightSyncError("an engine did not free its memory for the trainer:\n  " + "\n  ".join(awake))


class ActorMemory:
    """Whether this rank's actor is on its device or offloaded, when it must not be used. Both calls may be repeated."""

    def __init__(self, actor: Actor):
        self._actor = actor
        self._offloaded: ExitStack | None = None

    def offload(self) -> None:
        if self._offloaded is None:
            self._offloaded = ExitStack()
            freed = self._offloaded.enter_context(self._actor.offloaded())
            log.debug("offloaded %.2f GB for the engines", freed / 1e9)

    def onload(self) -> None:
        """Call it when the engines sleep."""
        offloaded, self._offloaded = self._offloaded, None
        if offloaded is not None:
            offloaded.close()
