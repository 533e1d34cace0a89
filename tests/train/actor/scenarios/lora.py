"""Adapters in every layout. Every function runs on all ranks and returns plain values from rank 0."""

from typing import Any

import torch

from dppo_megatron.objectives import build_objective
from tests.support.actor_cases import micro_batches, pack, sequences
from tests.support.actor_ranks import Rank

R, ALPHA = 4, 6.0
SOME = ("q_proj", "v_proj", "up_proj", "down_proj")
SOME_EXPERTS = ("q_proj", "v_proj", "experts.0.gate_proj", "experts.0.down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

DELTA_NET = (
    *LATENT[4:],
    "q_proj",
    "k_proj",
    "v_proj",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "out_proj",
)
SOME_DELTA_NET = ("q_proj", "in_proj_qkv", "in_proj_a", "up_proj")


def settings(targets: tuple[str, ...] | None = None, **changes: Any) -> dict[str, Any]:
    lora = {"r": R, "alpha": ALPHA} | ({"targets": list(targets)} if targets else {})
    return {"lora": lora} | changes


def random_adapter(hf: Any, config: Any) -> dict[str, torch.Tensor]:
    """The same in every layout, with a B that is not 0."""
    from dppo_megatron.hf.peft import adapter_shapes

    generator = torch.Generator().manual_seed(11)
    shapes = adapter_shapes(hf, config)
    return {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def fill(actor: Any) -> dict[str, torch.Tensor]:
    from dppo_megatron.hf.peft import fill_adapters

    tensors = random_adapter(actor.hf, actor.config.model.lora)
    fill_adapters(actor.model_chunks, tensors, actor.hf)
    actor.optimizer.reload_model_params()
    return tensors


def exported(rank: Rank, actor: Any) -> dict[str, torch.Tensor]:
    """A and B of the whole model."""
    from dppo_megatron.common.ranks import Ranks
    from dppo_megatron.hf.export import export_adapters

    own = {name: tensor.detach().clone() for name, tensor in export_adapters(actor.model_chunks, actor.hf)}
    return {name: tensor for part in Ranks().gather(own, "the adapters") for name, tensor in part.items()}


def gradients(rank: Rank, model: str, targets: tuple[str, ...] | None, changes: dict, layout: dict) -> dict[str, Any]:
    """The gradient of every A and B, its norm, log-probs before, and adapters after two updates."""
    from dppo_megatron.hf.lora import adapters_of

    found: dict[str, Any] = {}
    optimizer = {"grad_clip": 0.0}
    for sharded in (False, True):  # without the distributed optimizer each rank has the whole sum
        parallel = {**layout, "distributed_optimizer": sharded}
        with rank.actor(model, settings=settings(targets, **changes), optimizer=optimizer, **parallel) as actor:
            fill(actor)
            place, size = actor.layout.data_parallel_rank, actor.layout.data_parallel_size
            batches = micro_batches(sequences()[place::size], 2)
            found["logprobs"] = torch.cat(actor.logprobs([pack(sequences())]))
            stats = actor.train_update(batches, build_objective("nll"), another_follows=sharded)
            found["loss"], found["grad_norm"] = stats.loss, stats.grad_norm
            if sharded:
                actor.train_update(batches, build_objective("nll"))
                found["trained"] = exported(rank, actor)
                continue
            for adapter in adapters_of(actor.model_chunks):
                for parameter in (adapter.A, adapter.B):
                    parameter.data.copy_(parameter.main_grad)
            found["gradients"] = exported(rank, actor)
    return found
