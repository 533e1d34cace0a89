"""A fixed set of engines behind one call, for work that a failing engine ends; see `watched_pool` for a run's."""

from __future__ import annotations

from collections.abc import Sequence

from dppo_megatron.engines.protocol import Engine, GenerateRequest
from dppo_megatron.types import Rollout


class FixedEngines:
    """Each request goes to the engine with the fewest running requests."""

    def __init__(self, engines: Sequence[Engine]):
        self._engines = tuple(engines)
        self._running = [0] * len(self._engines)

    async def generate(self, request: GenerateRequest) -> tuple[Rollout, ...]:
        """As `Engine.generate`, on the least loaded engine."""
        index = min(range(len(self._engines)), key=self._running.__getitem__)
        self._running[index] += 1
        try:
            return await self._engines[index].generate(request)
        finally:
            self._running[index] -= 1
