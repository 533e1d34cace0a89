"""Retries a group with new seeds when the engine returned an invalid sample."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from dppo_megatron.engines.protocol import GenerateRequest, InvalidSample
from dppo_megatron.types import Rollout

log = logging.getLogger(__name__)

ATTEMPTS = 3


async def draw(
    generate: Callable[[GenerateRequest], Awaitable[tuple[Rollout, ...]]],
    request: Callable[[int], GenerateRequest],
    what: str,
    invalid: Callable[[], None] = lambda: None,
) -> tuple[Rollout, ...]:
    """What `generate` returns for `request(0)`, or for the request of the first later attempt that is not invalid.

    `what` names the prompt in messages; `invalid` is called for every refused group. Raises `InvalidSample` when all
    `ATTEMPTS` were.
    """
    for attempt in range(ATTEMPTS):
        try:
            return await generate(request(attempt))
        except InvalidSample as error:
            invalid()
            log.warning("%s: refused an invalid sample (%s); sampling again", what, error)
    raise InvalidSample(f"{what}: the engine returned an invalid group {ATTEMPTS} times; see its log")
