"""GPUs that engines share with the trainer belong to one of them at a time."""

from __future__ import annotations

import logging
from contextlib import ExitStack

from dppo_megatron.actor import Actor

from .engine_thread import EngineThread
from .errors import WeightSyncError

log = logging.getLogger(__name__)


def put_to_sleep(engines: EngineThread) -> None:
    """Has every engine that answers give its memory back. Raises `WeightSyncError` naming those that did not."""

    async def sleep(live) -> list[str]:
        answering, _ = await live.answering()
        replies = await live.on(answering, lambda engine: engine.sleep())
        return [str(reply) for reply in replies.values() if isinstance(reply, Exception)]

    if awake := engines.start(sleep).result():
        raise WeightSyncError("an engine did not give its memory back to the trainer:\n  " + "\n  ".join(awake))


class ActorMemory:
    """This rank's: lent to the engines, during which the actor must not be used, or with the actor."""

    def __init__(self, actor: Actor):
        self._actor = actor
        self._lent: ExitStack | None = None

    def lend(self) -> None:
        if self._lent is None:
            self._lent = ExitStack()
            freed = self._lent.enter_context(self._actor.offloaded())
            log.debug("lent %.2f GB to the engines", freed / 1e9)

    def take_back(self) -> None:
        """Call it when the engines sleep."""
        lent, self._lent = self._lent, None
        if lent is not None:
            lent.close()
