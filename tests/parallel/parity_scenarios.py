"""What the spawned ranks of the parity suite do: train on the bank in one layout."""

from __future__ import annotations

from typing import Any

from actor_ranks import Rank
from parity_cases import CASES, STEPS, sections

from dppo_megatron.objectives import build_objective
from dppo_megatron.rollout.bank import BankReader
from dppo_megatron.trainer.batches import BankBatches


def find(case: str) -> Any:
    return lambda rank: train(rank, case)


def train(rank: Rank, case: str) -> dict[str, list]:
    """STEPS steps of DPPO over the listed tokens; what the last layout or one process must agree on."""
    model, _ = case.split(":")
    name, _, variant = model.partition("+")
    bank = rank.models.parent / "banks" / name
    layout = CASES[rank.world_size][case]
    with rank.actor(name, sections=sections(bank, variant), **layout) as actor:
        objective = build_objective(actor.config.objective.name, **actor.config.objective.settings)
        place = actor.layout.data_parallel_rank, actor.layout.data_parallel_size
        batches = BankBatches(actor.config, BankReader(bank), objective, *place)
        stats = []
        for step in range(STEPS):
            (update,) = batches.read(step).updates
            stats.append(actor.train_update(update.micro_batches, objective))
    return {
        "loss": [s.loss for s in stats],
        "grad_norm": [s.grad_norm for s in stats],
        "masked": [s.metrics["masked/share"] for s in stats],
        "entropy": [s.metrics["entropy"] for s in stats],
        "disagreement": [s.metrics.get("moe/routing_replay_disagreement", 0.0) for s in stats],
        "tokens": [s.tokens for s in stats],
        "loss_tokens": [s.loss_tokens for s in stats],
        "masked_tokens": [s.masked for s in stats],
        "skipped": [s.skipped for s in stats],
    }
