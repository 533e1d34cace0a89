"""Where a step's batch comes from: the bank (RL) or a file of answers (supervised). Both give the same micro-batches.

Every denominator of the loss is fixed here, for the whole global update, before the first micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from dppo_megatron.config import Config
from dppo_megatron.data.packing import Sequence as PackedSequence
from dppo_megatron.data.packing import pack, plan_micro_batches
from dppo_megatron.data.prompts import PromptSource
from dppo_megatron.objectives import Objective, group_advantages, sequence_weights
from dppo_megatron.rollout.bank import BankEntry, BankReader
from dppo_megatron.types import TokenBatch


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """One optimizer update: this data-parallel rank's micro-batches. Every rank has the same number of them."""

    micro_batches: list[TokenBatch]
    sequences: int  # computed over all ranks
    tokens: int  # computed over all ranks


@dataclass(frozen=True, slots=True)
class StepBatch:
    updates: list[UpdateBatch]  # may be empty: no group of the batch had a signal
    metrics: dict[str, float]


class BatchSource(Protocol):
    def ready(self, step: int) -> bool:
        """Whether the batch of `step` can be read now; asked on global rank 0 alone."""

    def progress(self) -> str:
        """What has arrived so far, for the message of a wait that timed out."""

    def read(self, step: int) -> StepBatch:
        """The batch of `step` for this data-parallel rank; the same plan on every rank."""


class BankBatches:
    """Batch of step s: bank groups [s*G, (s+1)*G), in prompt order so that a resumed run sums in the same order."""

    def __init__(self, config: Config, reader: BankReader, objective: Objective, rank: int, size: int):
        self._config = config
        self._reader = reader
        self._objective = objective
        self._rank, self._size = rank, size

    def ready(self, step: int) -> bool:
        self._reader.refresh()
        return self._reader.num_groups >= (step + 1) * self._config.rollout.prompts_per_step

    def progress(self) -> str:
        return f"{self._reader.num_groups} groups in the bank"

    def read(self, step: int) -> StepBatch:
        groups = self._config.rollout.prompts_per_step
        self._reader.refresh()
        entries = sorted(self._reader.entries(step * groups, (step + 1) * groups), key=lambda e: e.position)
        self._check(entries)
        rewards = np.stack([e.rewards for e in entries])
        valid = ~np.stack([e.reward_failed for e in entries])
        advantages = group_advantages(
            torch.from_numpy(rewards), valid=torch.from_numpy(valid), kind=self._config.objective.advantage
        ).numpy()
        order = np.random.default_rng([self._config.run.seed, step]).permutation(groups)
        updates = [
            self._update([entries[i] for i in part], advantages[part], valid[part])
            for part in np.split(order, self._config.train.updates_per_step)
        ]
        return StepBatch(
            [u for u in updates if u is not None], self._metrics(step, entries, rewards, valid, advantages)
        )

    def _check(self, entries: Sequence[BankEntry]) -> None:
        rollout = self._config.rollout
        for entry in entries:
            if entry.temperature != rollout.temperature:
                raise ValueError(
                    f"rollout.temperature = {rollout.temperature}: prompt {entry.position} in the bank was sampled at "
                    f"{entry.temperature}; training log-probs must be those of the sampled distribution"
                )
            if len(entry.rewards) != rollout.group_size:
                raise ValueError(
                    f"rollout.group_size = {rollout.group_size}: prompt {entry.position} in the bank has "
                    f"{len(entry.rewards)} samples; use the setting the bank was filled with"
                )

    def _update(
        self, entries: Sequence[BankEntry], advantages: np.ndarray, valid: np.ndarray
    ) -> UpdateBatch | None:
        """Denominators count every valid sample; only samples that can move the policy are computed."""
        objective = self._config.objective
        response = np.stack([e.response_lengths for e in entries])
        carrying = torch.from_numpy(np.where(valid, response, 0)).flatten()
        weights = sequence_weights(objective.aggregation, carrying, horizon=self._config.horizon)
        weights = weights.view(response.shape).numpy()
        computed = valid & ((advantages != 0) | learns_without_advantage(self._objective))
        samples = np.argwhere(computed)
        if not len(samples):
            return None
        lengths = [int(entries[g].prompt_tokens + response[g, i]) for g, i in samples]
        plan = plan_micro_batches(lengths, self._size, self._config.train.micro_batch_tokens)
        read: dict[int, object] = {}
        micro_batches = []
        for indices in plan[self._rank]:
            sequences = []
            for g, i in samples[indices]:
                group = read.get(g) or read.setdefault(g, self._reader.read(entries[g]))
                sequences.append(
                    PackedSequence.of_rollout(
                        group.prompt,
                        group.rollouts[i],
                        advantage=float(advantages[g, i]),
                        loss_weight=float(weights[g, i]),
                        temperature=group.temperature,
                    )
                )
            micro_batches.append(pack(sequences, topk=self._config.rollout.topk_logprobs))
        return UpdateBatch(micro_batches, len(samples), sum(lengths))

    def _metrics(self, step, entries, rewards, valid, advantages) -> dict[str, float]:
        lengths = np.stack([e.response_lengths for e in entries])
        versions = np.array([e.min_version for e in entries])
        return {
            "rollout/reward_mean": float(rewards[valid].mean()) if valid.any() else 0.0,
            "rollout/response_tokens_mean": float(lengths.mean()),
            "rollout/truncated_share": float(np.mean([e.finish_reasons.get("length", 0) for e in entries]))
            / lengths.shape[1],
            "rollout/groups_without_signal": float((advantages == 0).all(axis=1).sum()),
            "rollout/reward_failed": float((~valid).sum()),
            "rollout/staleness_mean": float(step - versions.mean()),
        }


def learns_without_advantage(objective: Objective) -> bool:
    """True where a token without advantage still has a gradient: a KL to a reference or an entropy bonus."""
    return objective.settings.reference_kl != "none" or objective.settings.entropy_coefficient > 0


class SupervisedBatches:
    """Batch of step s: the next `rollout.prompts_per_step` prompts with their own answers."""

    def __init__(self, config: Config, prompts: PromptSource, tokenizer, rank: int, size: int):
        self._config = config
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._rank, self._size = rank, size

    def ready(self, step: int) -> bool:
        return True

    def progress(self) -> str:
        return f"{len(self._prompts)} examples"

    def read(self, step: int) -> StepBatch:
        count = self._config.rollout.prompts_per_step
        prompts = [self._prompts.prompt(p) for p in range(step * count, (step + 1) * count)]
        parts = np.split(np.arange(count), self._config.train.updates_per_step)
        return StepBatch([self._update([prompts[i] for i in part]) for part in parts], {})

    def _update(self, prompts) -> UpdateBatch:
        eos = self._tokenizer.eos_token_id
        answers = [
            np.array([*self._tokenizer.encode(p.answer, add_special_tokens=False), eos], np.int32)
            for p in prompts
        ]
        lengths = [len(p.token_ids) + len(a) for p, a in zip(prompts, answers, strict=True)]
        response = torch.tensor([len(a) for a in answers])
        weights = sequence_weights(self._config.objective.aggregation, response, horizon=self._config.horizon)
        plan = plan_micro_batches(lengths, self._size, self._config.train.micro_batch_tokens)
        micro_batches = [
            pack(
                [
                    PackedSequence.of_answer(prompts[i], answers[i], loss_weight=float(weights[i]))
                    for i in indices
                ]
            )
            for indices in plan[self._rank]
        ]
        return UpdateBatch(micro_batches, len(prompts), sum(lengths))
