"""Groups that an engine spoilt are drawn again with other seeds."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from dppo_megatron.engines.protocol import GenerateRequest, SpoiltSample
from dppo_megatron.types import Rollout

log = logging.getLogger(__name__)

ATTEMPTS = 3


async def draw(
    generate: Callable[[GenerateRequest], Awaitable[tuple[Rollout, ...]]],
    request: Callable[[int], GenerateRequest],
    what: str,
    spoilt: Callable[[], None] = lambda: None,
) -> tuple[Rollout, ...]:
    """What `generate` returns for `request(0)`, or for the request of the first later attempt that is not spoilt.

    `what` names the prompt in messages; `spoilt` is called for every refused group. Raises `SpoiltSample` when all
    `ATTEMPTS` were.
    """
    for attempt in range(ATTEMPTS):
        try:
            return await generate(request(attempt))
        except SpoiltSample as error:
            spoilt()
            log.warning("%s: refused a spoilt sample (%s); sampling again", what, error)
    raise SpoiltSample(f"{what}: the engine spoilt the group {ATTEMPTS} times; see its log")
