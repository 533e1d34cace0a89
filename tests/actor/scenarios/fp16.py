"""Training in fp16: the loss scale, and updates that overflow. Every function runs on all ranks."""

from __future__ import annotations

from typing import Any

import torch

from tests.actor.scenarios.parts import everywhere, fingerprint, resumed, same, topk, train
from tests.support.actor_cases import micro_batches, sequences
from tests.support.actor_ranks import Rank

INITIAL = 1024.0


def layouts(rank: Rank) -> dict[str, dict]:
    if rank.world_size == 1:
        return {"alone": {}, "plain": {"distributed_optimizer": False}, "lora": {"lora": {"r": 4}}}
    return {
        "data": {},
        "data_plain": {"distributed_optimizer": False},
        "tensor": {"tensor": 2, "sequence": True},
        "pipeline": {"pipeline": 2},
        "experts": {"model": "qwen3_moe", "expert": 2},
        "experts_plain": {"model": "qwen3_moe", "expert": 2, "distributed_optimizer": False},
    }


def given_of(*, loss_scale: dict | None = None, optimizer: dict | None = None, **layout: Any) -> dict[str, Any]:
    """What `Rank.actor` takes."""
    settings = {"dtype": "fp16"} | ({"lora": layout.pop("lora")} if "lora" in layout else {})
    scale = {"initial": INITIAL, **(loss_scale or {})}
    return {"settings": settings, "optimizer": {"loss_scale": scale, **(optimizer or {})}, **layout}


def actor_of(rank: Rank, **given: Any):
    return rank.actor(**given_of(**given))


def share(actor) -> list:
    """This rank's micro-batches of the usual sequences."""
    return micro_batches(sequences()[actor.layout.data_parallel_rank :: actor.layout.data_parallel_size], 2)


class Overflow:
    """Plants an infinity in the gradient of one parameter of one rank, as if its backward pass had overflowed."""

    def __init__(self, actor, where: str, rank: int):
        self._actor, self._where, self._rank = actor, where, rank

    def __enter__(self) -> None:
        self._handles = []
        if self._actor.layout.rank != self._rank:
            return
        chunk = self._actor.model_chunks[0]
        parameter = next(p for name, p in chunk.named_parameters() if p.requires_grad and self._where in name)
        self._handles.append(parameter.register_hook(lambda grad: torch.full_like(grad, torch.inf)))

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()


def overflows(rank: Rank) -> Any:
    """Let one rank overflow in the second of three updates, in every layout."""
    results = {}
    for name, layout in layouts(rank).items():
        with actor_of(rank, **layout) as actor:
            where = "experts.local" if "experts" in name else ""
            first = actor.train_update(share(actor), topk())
            before, lr = fingerprint(actor), actor.lr
            with Overflow(actor, where, rank.world_size - 1):
                second = actor.train_update(share(actor), topk())
            unchanged = everywhere(same(before, fingerprint(actor))) and actor.lr == lr
            third = actor.train_update(share(actor), topk())
            everyone = [None] * rank.world_size
            mine = [(s.skipped, s.overflowed, s.skipped_in_a_row, s.loss_scale) for s in (first, second, third)]
            torch.distributed.all_gather_object(everyone, mine)
            moved = everywhere(not same(before, fingerprint(actor)))
            results[name] = {"everyone": everyone, "unchanged": unchanged, "moved": moved}
    return results


def against_fp32(rank: Rank) -> Any:
    """Loss and gradient norm of updates in fp32, and in fp16 by several scales; in fp16 by one micro-batch and four."""
    results = {}
    for name, layout in (layouts(rank) if rank.world_size == 2 else {"alone": {}}).items():
        model = layout.get("model", "qwen3")
        kept = {key: value for key, value in layout.items() if key != "model"}
        with rank.actor(model, **kept) as actor:
            results[name, "fp32"] = train(actor, sequences())
        for scale in (1.0, 2.0**14) if rank.world_size == 1 else (2.0**10,):
            with actor_of(rank, loss_scale={"initial": scale}, **layout) as actor:
                results[name, scale] = train(actor, sequences())
    if rank.world_size == 1:
        for split in (1, 4):
            with actor_of(rank) as actor:
                results["split", split] = train(actor, sequences(), updates=1, split=split)
        with actor_of(rank, optimizer={"grad_clip": 0}) as actor:
            results["unclipped", "fp16"] = train(actor, sequences())
    return results


def scale_follows(rank: Rank) -> Any:
    """Let the scale grow after its interval, and overflow down to the smallest scale."""
    from dppo_megatron.actor import TrainingDiverged
    from dppo_megatron.actor.loss_scale import LossScale
    from dppo_megatron.config.model import LARGEST, LossScaleConfig

    optimizer = {"max_skipped_in_a_row": 2}
    with actor_of(rank, loss_scale={"growth_interval": 2, "smallest": INITIAL / 2}, optimizer=optimizer) as actor:
        grown = [actor.train_update(share(actor), topk()).loss_scale for _ in range(5)]
        stats, error = [], None
        with Overflow(actor, "layers.0.mlp", 0):
            try:
                for _ in range(9):
                    stats.append(actor.train_update(share(actor), topk()))
            except TrainingDiverged as raised:
                error = str(raised)
    with actor_of(rank, optimizer=optimizer) as actor:
        batches = share(actor)
        with torch.no_grad():
            actor.model_chunks[0].decoder.final_layernorm.weight[0] = torch.nan
        logits = actor.train_update(batches, topk())
        left = actor.loss_scale.value
        scale, largest = LossScale(LossScaleConfig(initial=LARGEST, growth_interval=1)), []
        for overflow in (False, True):
            scale.follow(overflow=overflow)
            largest.append(scale.value)
    return {
        "grown": grown,
        "fallen": [(s.loss_scale, s.overflowed, s.skipped_in_a_row) for s in stats],
        "error": error,
        "largest": largest,
        "logits": (logits.skipped, logits.overflowed, logits.skipped_in_a_row, left),
    }


def resume(rank: Rank) -> Any:
    """Saved after an overflow and in the middle of the scale's growth: see `resumed`."""

    def overflow(actor) -> None:
        with Overflow(actor, "", 0):
            actor.train_update(share(actor), topk())

    given = {name: given_of(loss_scale={"growth_interval": 3}, **layout) for name, layout in layouts(rank).items()}
    return {name: resumed(rank, name, layout, overflow, updates=3) for name, layout in given.items()}
