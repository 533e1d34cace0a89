"""Partial rollouts: a sample that was cut off, as by a weight update, goes on from the tokens it has."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np

from dppo_megatron.engines.protocol import GenerateRequest
from dppo_megatron.types import Rollout

Generate = Callable[[GenerateRequest], Awaitable[tuple[Rollout, ...]]]


class Continuation:
    """`generate` whose samples are all complete: each that ends with "abort" is asked for again behind its tokens.

    So a response may be of several policies; every token keeps the log-prob and the version it was sampled with.
    `count` hears of the number of samples each time some are continued.
    """

    def __init__(self, generate: Generate, count: Callable[[int], None] = lambda _: None):
        self._generate = generate
        self._count = count

    async def __call__(self, request: GenerateRequest) -> tuple[Rollout, ...]:
        rollouts = await self._generate(request)
        cut = sum(rollout.finish_reason == "abort" for rollout in rollouts)
        if not cut:
            return rollouts
        self._count(cut)
        return tuple(await asyncio.gather(*(self._complete(request, i, r) for i, r in enumerate(rollouts))))

    async def _complete(self, request: GenerateRequest, sample: int, rollout: Rollout) -> Rollout:
        pieces = 0
        while rollout.finish_reason == "abort":
            left = request.max_tokens - len(rollout.token_ids)
            if left == 0:
                return replace(rollout, finish_reason="length")
            if pieces:
                self._count(1)
            pieces += 1
            (rest,) = await self._generate(_continued(request, sample, rollout.token_ids, left, pieces))
            rollout = _joined(len(request.token_ids), rollout, rest)
        return rollout


def _continued(request: GenerateRequest, sample: int, tokens: np.ndarray, left: int, piece: int) -> GenerateRequest:
    # The engine draws from the start of a seed's stream: the same seed would repeat the draws of the first tokens.
    seed = np.random.SeedSequence([request.seeds[sample], len(tokens)]).generate_state(1, np.uint64)[0]
    return replace(
        request,
        request_id=f"{request.request_id}+{sample}.{piece}",
        token_ids=np.concatenate([request.token_ids, tokens]),
        n=1,
        seeds=(int(seed) >> 1,),
        max_tokens=left,
    )


def _joined(prompt_tokens: int, first: Rollout, rest: Rollout) -> Rollout:
    def both(name: str) -> np.ndarray | None:
        one, two = getattr(first, name), getattr(rest, name)
        return None if one is None or two is None else np.concatenate([one, two])

    experts = None
    if first.routed_experts is not None and rest.routed_experts is not None:
        # Of the tokens that both pieces read, those that the policy of the time was routed to.
        read = max(prompt_tokens + len(first.token_ids) - 1, 0)
        experts = np.concatenate([first.routed_experts[:read], rest.routed_experts[read:]])
    names = ("token_ids", "rollout_logprob", "versions", "topk_ids", "rollout_topk_logprob")
    return Rollout(**{name: both(name) for name in names}, finish_reason=rest.finish_reason, routed_experts=experts)
