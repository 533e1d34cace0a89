"""Build a run's publisher and the tokens for the weight check."""

from __future__ import annotations

import itertools

import numpy as np

from dppo_megatron.common.ranks import Ranks
from dppo_megatron.config import Config
from dppo_megatron.data.prompts import PromptSource
from dppo_megatron.train.actor import Actor

from .broadcast import Broadcast
from .engine_thread import EngineThread
from .publisher import Publisher
from .shared_storage import SharedStorage
from .transport import Transport

CHECK_TOKENS = 64


def build_publisher(
    config: Config, actor: Actor, engines: EngineThread | None, check_tokens: np.ndarray | None
) -> Publisher:
    """Return the publisher. Collective. Ranks other than 0 pass None as `engines` and `check_tokens`.

    `check_tokens`: see `weight_check_tokens`.
    """
    # The other ranks wait while rank 0 waits for an engine to return, to end its update, or to score.
    timeout_s = config.engine.unavailable_timeout_s + 4 * config.weight_sync.timeout_s + config.request_timeout_s
    ranks = Ranks(timeout_s)
    transport: Transport
    if config.weight_sync.transport == "broadcast":
        transport = Broadcast(config, actor, ranks, engines)
    else:
        transport = SharedStorage(config, actor, ranks)
    tokens = ranks.from_rank_zero(lambda: check_tokens, "the tokens of the weight check")
    assert tokens is not None  # rank 0 has them
    return Publisher(config, actor, engines, ranks, transport, tokens)


def weight_check_tokens(prompts: PromptSource, max_model_len: int) -> np.ndarray:
    """Return [S] int32: the first tokens in the run's prompts, end to end.

    S is at most `CHECK_TOKENS` and less than `max_model_len`. The tokens are real text, and equal in every attempt of
    the run.
    """
    tokens = itertools.chain.from_iterable(prompts.prompt(position).token_ids for position in range(len(prompts)))
    return np.fromiter(itertools.islice(tokens, min(CHECK_TOKENS, max_model_len - 1)), np.int32)
