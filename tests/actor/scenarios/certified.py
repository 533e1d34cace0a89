"""Compute the log-probs that `dppo-megatron certify` compares, for samples with known log-probs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from dppo_megatron.certify.rank import ScoredResponse, _Measurement
from dppo_megatron.types import Prompt, Rollout, TokenBatch
from tests.support.actor_cases import VOCAB
from tests.support.actor_ranks import Rank

TEMPERATURE, SAMPLES = 0.7, 4
PROMPTS, RESPONSE = (40, 23), 30


def certified(rank: Rank) -> dict[str, tuple[dict[str, Any], list[TokenBatch]]]:
    """By precision: the tables, and the micro-batches of the first pass."""
    return {dtype: _measured(rank, dtype) for dtype in ("fp32", "bf16")}


def _measured(rank: Rank, dtype: str) -> tuple[dict[str, Any], list[TokenBatch]]:
    known = AutoModelForCausalLM.from_pretrained(rank.models / "qwen3", dtype=torch.float32)
    generator = np.random.default_rng(0)

    def sample(prompt: Prompt) -> ScoredResponse:
        response = generator.integers(0, VOCAB, RESPONSE, dtype=np.int32)
        tokens = torch.from_numpy(np.concatenate([prompt.token_ids, response]).astype(np.int64))
        with torch.no_grad():
            logits = known(tokens[None]).logits[0, :-1]
        at_one, at_run = (
            torch.log_softmax(logits / t, -1).gather(1, tokens[1:, None])[:, 0].numpy() for t in (1.0, TEMPERATURE)
        )
        rollout = Rollout(response, at_run[-RESPONSE:], np.zeros(RESPONSE, np.int32), "stop")
        return ScoredResponse(prompt, rollout, at_one, at_one)

    prompts = [
        Prompt(n, n, generator.integers(0, VOCAB, size, dtype=np.int32), "", "") for n, size in enumerate(PROMPTS)
    ]
    samples = [sample(prompt) for prompt in prompts for _ in range(SAMPLES)]
    settings, passes = {"dtype": dtype}, []
    with rank.actor(settings=settings, sections={"rollout": {"temperature": TEMPERATURE}}) as actor:
        assert actor.shares_prefixes
        logprobs = actor.logprobs
        actor.logprobs = lambda batches: passes.append(batches) or logprobs(batches)
        tables = _Measurement(actor.config, actor, None, "")._logprobs(samples)[0]
    return tables, passes[0]
