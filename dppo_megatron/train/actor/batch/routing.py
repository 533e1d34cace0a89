"""Replays routing (R3): routers use the engine's experts in forward passes, recomputations and backward passes.

A micro-batch contains the experts (`PackedSequences.replay`), and every layer passes the layer's experts to the router
on each call. So the replay does not depend on the pipeline schedule, even if a stage runs a micro-batch again to
recompute activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor, nn

from dppo_megatron.hf import HFModelConfig
from dppo_megatron.hf.megatron_model import unwrap
from dppo_megatron.objectives import Metric

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class ReplayedExperts:
    """Stores a micro-batch's experts for this rank's L layers and R rows; -1 where the router chooses.

    Example: experts [[[3, 1], [-1, -1]]] with L = 1, R = 2 and k = 2 replay experts 3 and 1 for the first row.
    """

    def __init__(self, experts: Int[Tensor, "L R k"]):
        self.experts = experts
        # A layer sets the counts instead of adding to them, so a recomputed layer is counted once.
        self.differing: list[Tensor | int] = [0] * len(experts)
        self.replayed: list[Tensor | int] = [0] * len(experts)

    def counts(self) -> Float[Tensor, " 2"]:
        """Count the replayed (token, layer, slot) triples that the router would not choose, and all, as fp64 [2]."""
        totals = torch.stack([torch.as_tensor(sum(n)).double() for n in (self.differing, self.replayed)])
        return totals.to(self.experts.device)


class RoutingReplay:
    """Replays routing in a model's chunks on this rank.

    `held_layers` are this rank's layers with experts, counted among all layers with experts in the model.
    """

    def __init__(self, hf: HFModelConfig, chunks: Sequence[nn.Module]):
        sparse = [i for i in range(hf.num_layers) if hf.is_moe_layer(i)]
        layer_indices: list[int] = []
        for layer in (layer for chunk in map(unwrap, chunks) for layer in chunk.decoder.layers):
            if not isinstance(layer.mlp, MoELayer):
                continue
            replay = _LayerReplay(len(layer_indices))
            layer.mlp.router.router_replay = replay
            layer.register_forward_pre_hook(replay.take, with_kwargs=True)
            layer_indices.append(sparse.index(layer.layer_number - 1))
        self.held_layers = tuple(layer_indices)

    def disagreement(self, replayed: Sequence[ReplayedExperts | None], device: torch.device) -> dict[str, Metric]:
        """Return the share of replayed (token, layer, slot) triples that the trainer's router would not have chosen.

        An all-reduce adds up the counts for `replayed` on all ranks. Ranks that route the same rows add equal counts,
        so the share does not change.
        """
        counts = torch.zeros(2, dtype=torch.float64, device=device)
        for experts in replayed:
            if experts is not None:
                counts += experts.counts()
        dist.all_reduce(counts)
        return {"moe/routing_replay_disagreement": Metric("mean", counts.cpu(), counts.new_zeros(0).cpu())}


class _LayerReplay(RouterReplay):
    """Chooses the top-k for Megatron's router. Does not register itself in Megatron's list of all routers."""

    def __init__(self, index: int):
        self.index = index  # number of the layer among this rank's layers with experts
        self.batch: ReplayedExperts | None = None

    def take(self, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        """Keep the micro-batch's recorded experts for the router of `layer`. Runs as the layer's forward pre-hook."""
        packed = kwargs.get("packed_seq_params")
        self.batch = None if packed is None else packed.replay

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the chosen scores [R, k] and experts [R, k]. The router selects by `scores` [R, E]."""
        topk_scores, topk_experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.batch is None:
            return topk_scores, topk_experts
        replay_experts = self.batch.experts[self.index].long()
        replayed = replay_experts >= 0
        experts = torch.where(replayed, replay_experts, topk_experts)
        in_topk = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, topk_experts, True).gather(1, experts)
        self.batch.differing[self.index] = (~in_topk).sum()
        self.batch.replayed[self.index] = replayed.sum()
        return scores.gather(1, experts), experts
