"""The totals of a plan for the whole run: parameters, batches, disk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dppo_megatron.common.dtypes import DTYPES
from dppo_megatron.config import Config
from dppo_megatron.hf import HFModelConfig, ModelError, WeightMap

from .engines import published_bytes
from .ranks import RankModel

_TOKEN_BYTES = 4 + 4 + 4  # id, log-prob and policy version of a sampled token
_LISTED_BYTES = 4 + 4  # id and log-prob


@dataclass(frozen=True, slots=True)
class Totals:
    """Exact counts of parameters; batches and disk where every response is as long as it may be."""

    parameters: int  # of the model as Hugging Face stores it, without multi-token prediction layers
    active: int  # those that one token uses
    sequences_per_update: int
    tokens_per_update: int
    micro_batches_per_update: int  # of one rank
    checkpoint_bytes: int
    published_bytes: int  # one policy version; 0 where nothing is published
    bank_bytes_per_step: int


def totals(hf: HFModelConfig, config: Config, ranks: Sequence[RankModel]) -> Totals:
    """Raises ModelError when the built ranks do not add up to the tensors of the Hugging Face model."""
    parameters = _parameters(hf, ranks)
    r, t = config.rollout, config.train
    sequences = r.prompts_per_step * r.group_size // t.updates_per_step
    longest = config.data.max_prompt_tokens + r.max_response_tokens
    tokens = sequences * longest
    # Weights in the model's dtype; the optimizer's fp32 parameters and two moments.
    checkpoint = parameters * (DTYPES[config.model.dtype].bytes + 12)
    return Totals(
        parameters=parameters,
        active=_active(hf, parameters),
        sequences_per_update=sequences,
        tokens_per_update=tokens,
        micro_batches_per_update=max(1, math.ceil(tokens / (config.data_parallel * t.micro_batch_tokens))),
        checkpoint_bytes=checkpoint,
        published_bytes=published_bytes(hf, config) if config.samples else 0,
        bank_bytes_per_step=_bank(hf, config) if config.samples else 0,
    )


def _parameters(hf: HFModelConfig, ranks: Sequence[RankModel]) -> int:
    expected = sum(math.prod(shape) for shape in WeightMap(hf).hf_tensors().values())
    built = sum(sum(rank.whole.values()) for rank in ranks)
    if built != expected:
        raise ModelError(hf.source, [f"the ranks' models hold {built:,} parameters in all, the files {expected:,}"])
    return expected


def _active(hf: HFModelConfig, parameters: int) -> int:
    if hf.moe is None:
        return parameters
    one = 3 * hf.hidden_size * hf.moe.ffn_hidden_size
    return parameters - sum(hf.moe.layers) * (hf.moe.num_experts - hf.moe.top_k) * one


def _bank(hf: HFModelConfig, config: Config) -> int:
    r = config.rollout
    kept = 4 * (1 + r.top_k) if r.truncated else 0  # at most
    sampled = r.max_response_tokens * (_TOKEN_BYTES + r.topk_logprobs * _LISTED_BYTES + kept)
    if r.routing_replay and hf.moe is not None:
        width = 1 if hf.moe.num_experts <= 256 else 2
        read = config.data.max_prompt_tokens + r.max_response_tokens - 1
        sampled += read * sum(hf.moe.layers) * hf.moe.top_k * width
    return r.prompts_per_step * (r.group_size * sampled + 4 * config.data.max_prompt_tokens)
