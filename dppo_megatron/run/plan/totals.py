"""Computes a plan's totals for the whole run: parameters, batches and disk."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dppo_megatron.bank.shapes import Shapes
from dppo_megatron.common.dtypes import DTYPES
from dppo_megatron.config import Config
from dppo_megatron.config.schema import CheckpointConfig
from dppo_megatron.config.task import EvalSet
from dppo_megatron.hf import HFModelConfig, ModelError, WeightMap
from dppo_megatron.hf.flops import ModelFlops, Work
from dppo_megatron.hf.peft import adapter_shapes

from .engines import published_bytes
from .ranks import RankModel

_BANK = ("bank_bytes_per_step", "bank_bytes", "kept_bank_bytes")
_TEXT_BYTES = 8  # bytes of text per token; assumed
_SAMPLE_BYTES = 256  # sizes, checksums and reward of a sample, in the blob's metadata or the index line
_GROUP_BYTES = 1024  # likewise for a group, including a share of begin and end lines


@dataclass(frozen=True, slots=True)
class Totals:
    """Contains exact parameter counts, and upper limits for batches and disk.

    The limits assume responses of maximal length.
    """

    parameters: int  # all that Hugging Face stores, without multi-token prediction layers
    active: int  # used by one token
    sequences_per_update: int
    tokens_per_update: int
    micro_batches_per_update: int  # on each rank
    flops_per_update: int  # model FLOPs of all ranks, as throughput/mfu counts them
    checkpoint_bytes: int
    published_bytes: int  # per policy version; 0 if nothing is published
    bank_bytes_per_step: int
    bank_bytes: int  # size after the whole run
    kept_bank_bytes: int  # largest size with checkpoint.keep_rollouts; 0 if it is not set
    evaluations: int
    answer_bytes: Mapping[str, int]  # set -> bytes of the answers to a prompt in an evaluation


def totals(hf: HFModelConfig, config: Config, ranks: Sequence[RankModel]) -> Totals:
    """Compute the totals. Raises ModelError when the ranks do not add up to the Hugging Face model."""
    parameters = _parameters(hf, ranks)
    r, t = config.rollout, config.train
    sequences = r.prompts_per_step * r.group_size // t.updates_per_step
    prompt = config.data.max_prompt_tokens
    longest = prompt + r.max_response_tokens
    tokens = sequences * longest
    work = Work(tokens, tokens * (longest + 1) // 2, sequences * r.max_response_tokens)
    # A checkpoint has trained weights in the model's dtype, and the optimizer's fp32 parameters and two moments.
    saved = parameters
    if config.model.lora.r:
        saved = sum(math.prod(shape) for shape in adapter_shapes(hf, config.model.lora).values())
    checkpoint = saved * (DTYPES[config.model.dtype].bytes + 12)
    return Totals(
        parameters=parameters,
        active=_active(hf, parameters),
        sequences_per_update=sequences,
        tokens_per_update=tokens,
        micro_batches_per_update=max(1, math.ceil(tokens / (config.data_parallel * t.micro_batch_tokens))),
        flops_per_update=ModelFlops.from_config(hf, config.model.lora).update(work),
        checkpoint_bytes=checkpoint,
        published_bytes=published_bytes(hf, config) if config.samples else 0,
        **(bank_disk(hf, config) if config.samples else dict.fromkeys(_BANK, 0)),
        evaluations=_evaluations(config.eval.every, t.steps),
        answer_bytes={name: _answer_bytes(prompt, one) for name, one in config.eval_sets.items()},
    )


def _evaluations(every: int, steps: int) -> int:
    """Count the evaluated policies: the first, the last, and the policies that the schedule selects."""
    return len({0, steps} | (set(range(every, steps, every)) if every else set()))


def _answer_bytes(prompt_tokens: int, one: EvalSet) -> int:
    assert one.max_response_tokens is not None
    texts = prompt_tokens + one.n * one.max_response_tokens
    return texts * _TEXT_BYTES + one.n * _SAMPLE_BYTES + _GROUP_BYTES


def _parameters(hf: HFModelConfig, ranks: Sequence[RankModel]) -> int:
    expected = sum(math.prod(shape) for shape in WeightMap(hf).hf_tensors().values())
    built = sum(sum(rank.whole.values()) for rank in ranks)
    if built != expected:
        raise ModelError(hf.source, [f"the ranks' models have {built:,} parameters, the files {expected:,}"])
    return expected


def _active(hf: HFModelConfig, parameters: int) -> int:
    if hf.moe is None:
        return parameters
    one = 3 * hf.hidden_size * hf.moe.ffn_hidden_size
    return parameters - sum(hf.moe.layers) * (hf.moe.num_experts - hf.moe.top_k) * one


def bank_disk(hf: HFModelConfig, config: Config) -> dict[str, int]:
    """Return the bank's `Totals` fields in bytes, for prompts and responses of maximal length."""
    r, longest = config.rollout, [config.rollout.max_response_tokens] * config.rollout.group_size
    routing = None
    if r.routing_replay and hf.moe is not None:
        routing = (sum(hf.moe.layers), hf.moe.top_k, 1 if hf.moe.num_experts <= 256 else 2)
    prompt = config.data.max_prompt_tokens
    fields = {"prompt_tokens": prompt, "lengths": longest, "topk": r.topk_logprobs, "routing": routing}
    if config.servers_teach:
        k = config.distillation.topk
        lists = {"teacher_ids": ["I32", k], "teacher_topk_logprob": ["F32", k]}
        fields["columns"] = {"teacher_logprob": ["F32"], **lists}
    if r.has_sampling_mask:
        fields["kept"] = [size * max(r.top_k, 1) for size in longest]  # an upper limit
    table = Shapes.from_fields(fields).table()
    tensors = max(entry["data_offsets"][1] for entry in table.values())
    header = len(json.dumps(table, separators=(",", ":"))) + prompt * _TEXT_BYTES
    group = tensors + header + r.group_size * _SAMPLE_BYTES + _GROUP_BYTES
    line = r.group_size * _SAMPLE_BYTES + _GROUP_BYTES
    step, index, steps = r.prompts_per_step * group, r.prompts_per_step * line, config.train.steps
    bank_bytes = steps * (step + index)
    kept_bank_bytes = min(bank_bytes, steps * index + kept_steps(config.checkpoint, r.max_staleness, steps) * step)
    return dict(zip(_BANK, (step + index, bank_bytes, kept_bank_bytes), strict=True))


def kept_steps(c: CheckpointConfig, max_staleness: int, steps: int) -> int:
    """Return how many steps are on disk at most with `checkpoint.keep_rollouts`, which counts as 0 if it is not set.

    Until a checkpoint is complete, all steps since the oldest kept checkpoint stay. Steps sampled in advance and the
    current step are added, because old data is deleted only when a step's first group is written.
    """
    if not c.every:
        return steps
    past_steps = max(c.keep * c.every, c.every + (c.keep_rollouts or 0)) + (c.every if c.asynchronous else 0)
    return min(steps, past_steps + max_staleness + 2)
