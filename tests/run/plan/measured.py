"""Bytes that an update really takes from the allocator, on every rank of a layout."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dppo_megatron.config import Config
from dppo_megatron.types import TokenBatch
from tests.support.actor_ranks import started_actor
from tests.support.ranks import Ranks, rendezvous

if TYPE_CHECKING:
    from dppo_megatron.train.actor import Actor

UPDATES, _UPDATE = 5, "one update"


def measure_updates(config: Config, sequences: int, micro_batches: int, directory: Path) -> list[int]:
    """Peak of tensor bytes on each rank over an update of equal micro-batches of `train.micro_batch_tokens`."""
    world_size = config.parallel.world_size
    with Ranks(world_size) as ranks:  # of their own: what other tests left in memory would be counted
        return ranks.run(_measure, config=config, sequences=sequences, micro_batches=micro_batches, directory=directory)


def _measure(rank: int, config: Config, sequences: int, micro_batches: int, directory: Path) -> int:
    rendezvous(directory)
    from dppo_megatron.objectives import build_objective

    with memory_profile() as profile, started_actor(config) as actor:
        place = actor.layout.data_parallel_rank
        batch = _batch(config.train.micro_batch_tokens, sequences, actor.hf.vocab_size, place)
        objective = build_objective(config.objective.name)
        for _ in range(UPDATES):
            with torch.profiler.record_function(_UPDATE):
                actor.train_update([batch] * micro_batches, objective)
    return _peak(profile, _state_bytes(actor))


def memory_profile() -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)


def _batch(tokens: int, sequences: int, vocab: int, seed: int) -> TokenBatch:
    """Equal sequences, every token of which but the last carries loss."""
    size = tokens // sequences
    ids = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(tokens) % size < size - 1
    return TokenBatch(
        token_ids=ids,
        position_ids=torch.arange(tokens) % size,
        cu_seqlens=torch.arange(0, tokens + 1, size, dtype=torch.int32),
        target_ids=torch.where(mask, ids.roll(-1), 0),
        mask=mask,
        loss_weight=mask / tokens,
        advantage=torch.ones(tokens),
        rollout_logprob=torch.full((tokens,), -8.0),
    )


def _state_bytes(actor: Actor) -> int:
    """Return the bytes of the optimizer's state, which the first update creates."""
    states = (state for part in actor.optimizer.chained_optimizers for state in part.optimizer.state.values())
    return sum(value.nbytes for state in states for value in state.values() if torch.is_tensor(value))


def _peak(profile: torch.profiler.profile, created: int) -> int:
    """Most bytes of CPU tensors alive at once during an update, in the one where they were fewest.

    What gloo's threads copied they release when they come to it, and the profiler does not see that: what seems alive
    grows from update to update. So each counts from its own beginning, where in truth there is what the actor was
    built with and what the first update `created`.
    """
    events = profile.profiler.kineto_results.events()
    updates = sorted((e.start_ns(), e.end_ns()) for e in events if e.name() == _UPDATE)
    assert len(updates) == UPDATES
    now, alive = 0, []
    for at, change in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += change
        alive.append((at, now))
    before = [[size for at, size in alive if at < start][-1] for start, _ in updates]
    peaks = [max(size for at, size in alive if start <= at <= end) for start, end in updates]
    grown = [peak - first for peak, first in zip(peaks[1:], before[1:], strict=True)]
    return before[0] + created + min(grown)


def measure_checkpoints(config: Config, directory: Path) -> list[tuple[int, int]]:
    """What saving and loading a checkpoint take on each rank beside what training holds: peaks of tensor bytes, and of
    files in memory while it is saved."""
    with Ranks(config.parallel.world_size) as ranks:
        return ranks.run(_measure_checkpoints, config=config, directory=directory)


def _measure_checkpoints(rank: int, config: Config, directory: Path) -> tuple[int, int]:
    rendezvous(directory)
    from dppo_megatron.train.actor.checkpoint.optimizer_state import materialise_state

    with started_actor(config) as actor:
        materialise_state(actor.optimizer)
        actor.save_checkpoint(directory, 1, {}, keep=1)  # what is made once and kept
        actor.finish_checkpoint()
        save = _growth(lambda: actor.save_checkpoint(directory, 2, {}, keep=1), files=True)
        actor.finish_checkpoint()
        return save, _growth(lambda: actor.load_checkpoint(directory))


def _growth(act: Callable[[], object], *, files: bool = False) -> int:
    """Return the peak of tensor bytes, with `files` also of Python's memory, such as files in memory."""
    with memory_profile() as profile:
        if files:
            tracemalloc.start()
        act()
        held = tracemalloc.get_traced_memory()[1]  # nothing where it has not started
        tracemalloc.stop()
    now = peak = 0
    events = (e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    for _, change in sorted((e.start_ns(), e.nbytes()) for e in events):
        now += change
        peak = max(peak, now)
    return peak + held
