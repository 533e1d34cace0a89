"""The ranks of the parity suite train on the bank in one layout."""

from functools import partial
from typing import Any
from unittest import mock

from dppo_megatron.bank import BankReader
from dppo_megatron.objectives import build_objective
from dppo_megatron.train.actor import forward, optimizer
from dppo_megatron.train.trainer.batches import BankBatches, parts_of
from tests.parallel.cases import CASES, DIVERGENCES, STEPS, bank_of, sections
from tests.support.actor_ranks import Rank


def batches_of(actor: Any, objective: Any) -> BankBatches:
    """The rank's share of the bank of its config."""
    place = actor.layout.data_parallel_rank, actor.layout.data_parallel_size
    bank, share = BankReader(actor.config.rollout.bank), actor.shares_prefixes
    return BankBatches(actor.config, bank, objective, *place, parts_of(actor, objective), share_prefixes=share)


def train(rank: Rank, case: str) -> dict[str, list]:
    """Train STEPS steps; return the values that every layout must agree on."""
    model, _ = case.split(":")
    name, _, variant = model.partition("+")
    bank = rank.models.parent / "banks" / bank_of(model)
    layout = CASES[rank.world_size][case]
    # Megatron's buckets hold 40 M parameters, all of these models: here each has its own.
    buckets = partial(optimizer.DistributedDataParallelConfig, bucket_size=1)
    late = []  # buckets that are still being gathered when the head reads its weight

    def head_statistics(model, *args, **settings):
        late.extend(group for group in model.bucket_groups if group.param_gather_handle is not None)
        return compute_head(model, *args, **settings)

    compute_head = forward.head_statistics
    with (
        mock.patch.object(optimizer, "DistributedDataParallelConfig", buckets),
        mock.patch.object(forward, "head_statistics", head_statistics),
        rank.actor(name, sections=sections(bank, variant), **layout) as actor,
    ):
        method = actor.config.objective
        changes = [{"distillation": kind} for kind in DIVERGENCES] if variant == "taught" else [{}] * STEPS
        objectives = [build_objective(method.name, **{**method.settings, **change}) for change in changes]
        batches = batches_of(actor, objectives[0])
        stats = []
        for step in range(STEPS):
            (update,) = batches.read(step).updates
            another = step + 1 < STEPS  # with `overlap`, new parameters reach the other ranks behind its forward pass
            stats.append(actor.train_update(update.micro_batches, objectives[step], another_follows=another))
    return {
        "loss": [s.loss for s in stats],
        "grad_norm": [s.grad_norm for s in stats],
        "masked": [s.metrics["policy/masked_share"] for s in stats],
        "entropy": [s.metrics["train/entropy"] for s in stats],
        "disagreement": [s.metrics.get("moe/routing_replay_disagreement", 0.0) for s in stats],
        "tokens": [s.tokens for s in stats],
        "measured": [s.metrics["train/tokens"] for s in stats],
        "loss_tokens": [s.loss_tokens for s in stats],
        "masked_tokens": [s.masked for s in stats],
        "skipped": [s.skipped for s in stats],
        "late_buckets": len(late),
    }
