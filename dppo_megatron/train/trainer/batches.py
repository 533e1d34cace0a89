"""Read a step's batch from the bank (RL) or an answer file (supervised), into one kind of micro-batch.

All loss denominators are fixed here, for the whole global update, before the first micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from dppo_megatron.bank import BankEntry, BankReader, ReadBuffer
from dppo_megatron.common.progress import last_progress
from dppo_megatron.config import Config
from dppo_megatron.data.micro_batches import Prefixes, computed_pairs, computed_rows, plan_micro_batches
from dppo_megatron.data.packing import TokenSequence, pack
from dppo_megatron.data.prompts import PromptFileError, PromptSource, answer_end, answer_ids
from dppo_megatron.errors import ExpectedError
from dppo_megatron.hf import read_hf_config
from dppo_megatron.objectives import ObjectiveProtocol, sequence_weights
from dppo_megatron.run_dir import RunDir
from dppo_megatron.types import COLUMNS, PARTS, POLICY, Prompt, Rollout, TokenBatch, column_named

from .step_samples import StepSamples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dppo_megatron.train.actor import Actor


AHEAD_BYTES = 32 << 20  # bytes of this and the next micro-batches that the system is asked to fetch
VISIBLE_S = 120.0  # time until a network file system shows every node the files that rank 0 has seen


class BankMismatch(ExpectedError, ValueError):
    """The bank was filled with settings that differ from the training run."""


@dataclass(frozen=True, slots=True)
class StoredSequence:
    """Identifies a sequence that `token_log` stores, with all tokens."""

    micro_batch: int  # index of the micro-batch on this data-parallel rank
    number: int  # index in the micro-batch
    position: int  # prompt position
    sample: int


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """Contains an optimizer update: this data-parallel rank's micro-batches, equally many on every rank."""

    micro_batches: list[TokenBatch]
    sequences: int  # sequences computed on all ranks
    tokens: int  # tokens in these sequences
    rows: int  # rows computed for these tokens: fewer where sequences share a prefix
    pairs: int  # query-key pairs in causal attention over these rows
    stored: tuple[StoredSequence, ...] = ()
    trajectories: int = 0  # trajectories with the sequences as branches; 0 = each sequence is a trajectory


@dataclass(frozen=True, slots=True)
class StepBatch:
    updates: list[UpdateBatch]  # empty if no group in the batch has a signal
    metrics: dict[str, float]


class BatchSource(Protocol):
    def ready(self, step: int) -> bool:
        """Return whether the batch of `step` can be read now; called only on global rank 0."""

    def progress(self) -> str:
        """Describe the progress so far in words; a wait times out when the text stops changing."""

    def read(self, step: int) -> StepBatch:
        """Return the batch of `step` for this data-parallel rank; every rank computes the same plan."""


class BankBatches:
    """Reads bank groups [s*G, (s+1)*G) for step s, in prompt order, so that a resumed run adds in the same order.

    Reads only the samples for data-parallel rank `rank`, and only the sample `parts` that `parts_of` returns.
    share_prefixes: keeps the samples in a group together, to compute the prompt once (`Actor.shares_prefixes`).
    """

    def __init__(
        self,
        config: Config,
        reader: BankReader,
        objective: ObjectiveProtocol,
        rank: int,
        size: int,
        parts: Sequence[str] = PARTS,
        *,
        share_prefixes: bool = False,
    ):
        self._config = config
        self._share_prefixes = share_prefixes
        self._parts = parts
        self._reader = reader
        self._objective = objective
        self._rank, self._size = rank, size
        self._buffer = ReadBuffer()  # contains one micro-batch; packing copies it entirely
        self._rollout_metrics = RunDir(config.run.dir).rollout_metrics
        self._positions = _positions(config)
        self._experts = read_hf_config(config.model.path).moe if config.rollout.routing_replay else None

    def ready(self, step: int) -> bool:
        self._reader.refresh()
        return self._reader.num_groups >= (step + 1) * self._config.rollout.prompts_per_step

    def progress(self) -> str:
        return f"{self._reader.num_groups} groups in the bank, {last_progress(self._rollout_metrics)}"

    def read(self, step: int) -> StepBatch:
        groups = self._config.rollout.prompts_per_step
        self._reader.wait_for((step + 1) * groups, VISIBLE_S)
        entries = sorted(self._reader.entries(step * groups, (step + 1) * groups), key=lambda e: e.position)
        self._check(entries)
        samples = StepSamples.from_entries(entries, self._config)
        order = np.random.default_rng([self._config.run.seed, step]).permutation(groups)
        updates = [
            self._update([entries[i] for i in part], samples.part(part))
            for part in np.split(order, self._config.train.updates_per_step)
        ]
        metrics = samples.metrics(self._config) | self._staleness(step, entries) | self._mask_metrics(entries)
        return StepBatch([u for u in updates if u is not None], metrics)

    def _staleness(self, step: int, entries: Sequence[BankEntry]) -> dict[str, float]:
        """Return metrics of the policy versions between sampling and training, over all sampled tokens."""
        tokens = sum(int(entry.sampled.sum()) for entry in entries)
        lag = step * tokens - sum(entry.version_sum for entry in entries)
        oldest = min((entry.min_version for entry in entries if entry.sampled.any()), default=step)
        return {
            "rollout/staleness_mean": lag / max(tokens, 1),
            "rollout/staleness_max": float(step - oldest),
            "rollout/mixed_version_groups": float(sum(e.min_version != e.max_version for e in entries)),
        }

    def _mask_metrics(self, entries: Sequence[BankEntry]) -> dict[str, float]:
        if not self._config.rollout.has_sampling_mask:
            return {}
        kept_tokens = sum(sum(entry.shapes.list_lengths["sampling_mask_ids"]) for entry in entries)
        return {"rollout/kept_tokens_mean": kept_tokens / max(sum(sum(entry.shapes.sampled) for entry in entries), 1)}

    def _check(self, entries: Sequence[BankEntry]) -> None:
        """Raise `BankMismatch` if the bank was filled with other settings or lacks turn rewards."""
        trained = [e for e in entries if not e.reward_failed.all()]
        if self._config.objective.credit == "turn" and trained and all(e.turn_rewards is None for e in trained):
            raise BankMismatch(
                "objective.credit = turn: the bank's groups of this step, the first of prompt "
                f"{trained[0].position}, have no rewards of turns; set it to trajectory"
            )
        for entry in entries:
            for setting, mismatch, remedy in self._differences(entry):
                raise BankMismatch(f"{setting}: prompt {entry.position} in the bank {mismatch}; {remedy}")

    def _differences(self, entry: BankEntry) -> Iterator[tuple[str, str, str]]:
        """Yield (setting with value, difference in the bank, remedy) for each difference in a group."""
        rollout, refill = self._config.rollout, "use the setting the bank was filled with"
        limit = f"rollout.max_response_tokens = {rollout.max_response_tokens}"
        context_lengths = entry.prompt_tokens + entry.response_lengths - entry.sampled
        for prompt, response in zip(context_lengths.tolist(), entry.sampled.tolist(), strict=True):
            if problem := self._config.too_long(self._positions, prompt, response):
                yield limit, f"has {problem}", "use the setting and the model that filled the bank"
        cut = entry.response_lengths[entry.truncated & (entry.response_lengths != rollout.max_response_tokens)]
        if len(cut) and entry.spans is None:  # an environment has other limits too
            yield limit, f"has a response that was cut at {cut[0]} tokens", refill
        if entry.temperature != rollout.temperature:
            mismatch = f"was sampled at {entry.temperature}, and training log-probs must be those of that distribution"
            yield f"rollout.temperature = {rollout.temperature}", mismatch, refill
        if (samples := int(entry.trajectories[-1]) + 1) != rollout.group_size:
            yield f"rollout.group_size = {rollout.group_size}", f"has {samples} samples", refill
        if entry.topk != rollout.topk_logprobs:
            mismatch = f"has {entry.topk} top-K log-probs per token"
            yield f"rollout.topk_logprobs = {rollout.topk_logprobs}", mismatch, refill
        if entry.has_sampling_mask != rollout.has_sampling_mask:
            setting = f"rollout.top_p = {rollout.top_p}, top_k = {rollout.top_k}, min_p = {rollout.min_p}"
            mismatch, remedy = ("with", "as it was") if entry.has_sampling_mask else ("without", "to 1, -1 and 0")
            yield setting, f"was sampled {mismatch} truncation", f"set them {remedy}"
        needs_teacher_lists = self._objective.needs_teacher and self._config.trainer_teacher is None
        teacher_columns = {c.name for c in COLUMNS if c.asked_by == "teacher" and needs_teacher_lists}
        if missing := {*self._objective.needs_columns, *teacher_columns} - entry.shapes.columns.keys():
            mismatch, remedy = f"has no {', '.join(sorted(missing))}", "use one that was filled with this objective"
            yield f"objective.name = {self._config.objective.name}", mismatch, remedy
        if self._experts is not None:
            layers, top_k = expected = sum(self._experts.layers), self._experts.top_k
            if entry.routing != expected:
                routing = entry.routing
                mismatch = "no routing" if routing is None else f"routing of {routing[0]} layers, {routing[1]} each"
                mismatch = f"has {mismatch}, the model has {layers} layers with {top_k} experts per token"
                remedy = "set it to false, or fill the bank with the model's own routing"
                yield "rollout.routing_replay = true", mismatch, remedy

    def _sequences(
        self, entry: BankEntry, samples: Sequence[int], advantages: np.ndarray, weights: np.ndarray
    ) -> dict[int, TokenSequence]:
        """Return the given samples of a group. advantages [n, T] and weights [n] cover all the group's trajectories."""
        group = self._reader.read(entry, samples, self._parts, self._buffer)
        experts = self._experts if "routes" in self._parts else None
        if experts is not None:
            routes = [r.routed_experts for r in group.rollouts if r.routed_experts is not None]
            largest = max(int(route.max(initial=0)) for route in routes)
            if largest >= experts.num_experts:
                raise BankMismatch(
                    f"rollout.routing_replay = true: prompt {entry.position} in the bank names expert {largest}, the "
                    f"model has {experts.num_experts}; set it to false, or use a bank that this model filled"
                )
        return {
            i: TokenSequence.from_rollout(
                group.prompt,
                rollout,
                advantage=_token_advantages(advantages[trajectory], entry, trajectory, rollout),
                loss_weight=float(weights[trajectory]),
                temperature=group.temperature,
                replay_routing=experts is not None,
            )
            for i, trajectory, rollout in zip(samples, entry.trajectories[samples], group.rollouts, strict=True)
        }

    def _update(self, entries: Sequence[BankEntry], samples: StepSamples) -> UpdateBatch | None:
        """Plan and pack an update. Only samples that can move the policy are computed.

        The denominators count every trajectory that carries loss.
        """
        advantages, weights = samples.advantages, samples.loss_weights(self._config)
        moves = (advantages != 0).any(axis=2) | self._objective.moves_without_advantage
        is_computed = (samples.carrying > 0) & moves
        group_samples = [
            np.flatnonzero(is_computed[g, e.trajectories] & (e.sampled > 0)) for g, e in enumerate(entries)
        ]
        computed = np.array([(g, i) for g, indices in enumerate(group_samples) for i in indices])
        if not len(computed):
            return None
        prompts = np.array([entries[g].prompt_tokens for g, _ in computed])
        lengths = prompts + [entries[g].response_lengths[i] for g, i in computed]
        prefixes = Prefixes(computed[:, 0], prompts) if self._share_prefixes else None
        plan = plan_micro_batches(lengths, self._size, self._config.train.micro_batch_tokens, prefixes)
        columns = entries[computed[0, 0]].shapes.columns
        like = {name: shape for name, (_, shape) in columns.items() if column_named(name).part in self._parts}
        micro_batches = []
        # Each micro-batch is packed before the next micro-batch is read into the same memory.
        samples_by_batch = [computed[indices].reshape(-1, 2) for indices in plan[self._rank]]
        for batch_samples in self._fetched_ahead(entries, samples_by_batch):
            self._buffer.reuse()
            by_group = _by_group(batch_samples)
            sequences = {
                g: self._sequences(entries[g], indices, advantages[g], weights[g]) for g, indices in by_group.items()
            }
            micro_batches.append(
                pack([sequences[g][i] for g, i in batch_samples], like=like, share_prefixes=self._share_prefixes)
            )
        stored = self._stored(entries, computed, plan[self._rank])
        rows = sum(computed_rows(batch, lengths, prefixes) for rank_batches in plan for batch in rank_batches)
        pairs = computed_pairs(plan, lengths, prefixes)
        trajectories = len({(g, entries[g].trajectories[i]) for g, i in computed})
        return UpdateBatch(micro_batches, len(computed), int(lengths.sum()), rows, pairs, stored, trajectories)

    def _fetched_ahead(self, entries: Sequence[BankEntry], samples_by_batch: list[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield this rank's micro-batches in the update, each as [C, 2]: group and sample.

        The system fetches later micro-batches in the background, so that the disk works while a micro-batch is checked
        and packed.
        """
        sizes: list[int] = []
        for number, samples in enumerate(samples_by_batch):
            while len(sizes) < len(samples_by_batch) and sum(sizes[number:]) < AHEAD_BYTES:
                requests = [(entries[g], indices) for g, indices in _by_group(samples_by_batch[len(sizes)]).items()]
                sizes.append(self._reader.prefetch(requests, self._parts))
            yield samples

    def _stored(
        self, entries: Sequence[BankEntry], computed: np.ndarray, plan: list[list[int]]
    ) -> tuple[StoredSequence, ...]:
        """Return the sequences that this rank stores. Groups are drawn until they contain enough sequences.

        computed: [C, 2], group and sample of all computed sequences, which `plan` assigns to micro-batches.
        Example: groups are drawn in the order [2, 0, 1], so group 0 is second, 1 third and 2 first: turn [1, 2, 0], the
        argsort of the order. With computed groups [0, 0, 1, 2, 2], the sequences have turns [1, 1, 2, 0, 0]. To store
        three, the stable argsort [3, 4, 0, 1, 2] takes both sequences from group 2 and the first from group 0.
        """
        num_sequences = -(-self._config.tracking.token_sequences // self._config.train.updates_per_step)
        if not num_sequences:
            return ()
        order = np.random.default_rng([self._config.run.seed, entries[0].position]).permutation(len(entries))
        turn = np.argsort(order)
        stored_indices = set(np.argsort(turn[computed[:, 0]], kind="stable")[:num_sequences].tolist())
        return tuple(
            StoredSequence(batch, number, entries[computed[c, 0]].position, int(computed[c, 1]))
            for batch, indices in enumerate(plan)
            for number, c in enumerate(indices)
            if c in stored_indices
        )


def _positions(config: Config) -> int:
    """Return the longest sequence, in tokens, that both the policy and the trainer's teacher can read."""
    models = filter(None, (config.model.path, config.trainer_teacher))
    return min(read_hf_config(path).max_position_embeddings for path in models)


def _by_group(samples: np.ndarray) -> dict[int, list[int]]:
    """Return group -> samples: [C, 2] group and sample [[0, 1], [2, 0], [0, 3]] give {0: [1, 3], 2: [0]}."""
    return {g: samples[samples[:, 0] == g, 1].tolist() for g in np.unique(samples[:, 0]).tolist()}


def _token_advantages(
    advantages: np.ndarray, entry: BankEntry, trajectory: int, rollout: Rollout
) -> float | np.ndarray:
    """Return one advantage for all sampled tokens in a branch, or [R], per token. `advantages` [T] are per turn."""
    if rollout.spans is None or len(advantages) == 1:
        return float(advantages[0])
    _, tokens, turns = rollout.spans[rollout.spans[:, 0] == POLICY].T
    num_turns = 0 if entry.turn_rewards is None else len(entry.turn_rewards[trajectory])
    if num_turns and turns.max() >= num_turns:
        raise BankMismatch(
            f"objective.credit = turn: prompt {entry.position} in the bank has rewards of only {num_turns} turns "
            f"of trajectory {trajectory}, but turn {turns.max()} was sampled; set it to trajectory"
        )
    return np.repeat(advantages[turns if num_turns else np.zeros_like(turns)], tokens)


def parts_of(actor: Actor, objective: ObjectiveProtocol) -> tuple[str, ...]:
    """Return the sample parts that this rank reads: lists and masks for the loss, routes for expert replay."""
    parts = ["core"]
    acceptance = actor.config.acceptance  # compares lists on every rank, as a statistic with a teacher's log-probs does
    reads_lists = objective.needs_statistic and objective.needs_teacher
    reads_lists = reads_lists or (acceptance.bound is not None and acceptance.divergence == "objective")
    if actor.layout.is_last_stage or reads_lists:
        parts += ["topk", "sampling_mask"]
    if actor.routing is not None and actor.routing.held_layers:
        parts.append("routes")
    return tuple(parts)


class SupervisedBatches:
    """Reads a step's batch: the next `rollout.prompts_per_step` prompts with the answers in their rows."""

    def __init__(self, config: Config, prompts: PromptSource, tokenizer: PreTrainedTokenizerBase, rank: int, size: int):
        self._config = config
        self._prompts = prompts
        self._tokenizer, self._end = tokenizer, answer_end(config, tokenizer)
        self._positions = _positions(config)
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

    def _update(self, prompts: Sequence[Prompt]) -> UpdateBatch:
        answers = [answer_ids(self._tokenizer, p.answer, self._end) for p in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            if problem := self._config.too_long(self._positions, len(prompt.token_ids), len(answer)):
                raise PromptFileError(
                    self._config.data.train, problem=f"row {prompt.row + 1}: {problem}; raise the limit, or remove it"
                )
        lengths = [len(p.token_ids) + len(a) for p, a in zip(prompts, answers, strict=True)]
        response = torch.tensor([len(a) for a in answers])
        weights = sequence_weights(self._config.objective.aggregation, response, horizon=self._config.horizon)
        plan = plan_micro_batches(lengths, self._size, self._config.train.micro_batch_tokens)
        micro_batches = [
            pack([TokenSequence.from_answer(prompts[i], answers[i], loss_weight=float(weights[i])) for i in indices])
            for indices in plan[self._rank]
        ]
        pairs = computed_pairs(plan, np.array(lengths), None)
        return UpdateBatch(micro_batches, len(prompts), sum(lengths), sum(lengths), pairs)
