"""Adapters in every layout. Every function runs on all ranks and returns plain values from rank 0."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from dppo_megatron.objectives import build_objective
from tests.actor.scenarios.parts import resumed, train
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


def grouped(rank: Rank, dtype: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Of one layer, how far values and gradients of its grouped experts are from those one after the other, relative.

    And the storages of their weights, before and after an offload and a checkpoint; the line of the log; the calls.
    """
    from megatron.core.transformer.moe.experts import SequentialMLP

    with rank.actor("qwen3_moe", settings=settings(dtype=dtype), **layout) as actor:
        fill(actor)
        found: dict[str, Any] = {"line": [line for line in actor.describe() if line.startswith("experts")]}
        experts = actor.model_chunks[0].decoder.layers[-1].mlp.experts
        adapters = [p for name, p in experts.named_parameters() if ".lora." in name]
        hooked: set[Any] = set()  # Megatron gathers parameters in hooks like these
        for adapter in (module for name, module in experts.named_modules() if name.endswith(".lora")):
            adapter.register_forward_pre_hook(lambda adapter, _: hooked.add(adapter))
        generator = torch.Generator().manual_seed(3)
        uneven = torch.arange(len(experts.local_experts)).flip(0) ** 2  # the last one has no tokens
        for name, counts in {"uneven": uneven, "first_empty": uneven.flip(0), "none": 0 * uneven}.items():
            tokens = int(counts.sum())
            x, upstream = (torch.randn(2, tokens, 32, generator=generator)).to(adapters[0].dtype)
            probs = torch.rand(tokens, generator=generator).requires_grad_()
            wanted, got = [], []
            with mock.patch("torch.nn.functional.grouped_mm", wraps=torch.nn.functional.grouped_mm) as product:
                for values, call in ((wanted, partial(SequentialMLP.forward, experts)), (got, experts)):
                    hooked.clear()
                    out, bias = call(x.requires_grad_(), counts, probs)
                    values += [out, *torch.autograd.grad(out, [x, probs, *adapters], upstream)]
                    assert bias is None
            found[name] = max(
                float((g - w).norm() / w.norm().clamp_min(1e-9)) for g, w in zip(got, wanted, strict=True)
            )
            found[f"{name}_calls"] = product.call_count
            found["hooked"] = found.get("hooked", True) and len(hooked) * 2 == len(adapters)
        found["storages"] = [_storages(experts)]
        before = [p.detach().clone() for p in experts.parameters()]
        with actor.offloaded():
            pass
        actor.save_checkpoint(rank.directory / "grouped", 1, {}, keep=1)
        for weight in experts.parameters():
            weight.data.zero_()
        actor.load_checkpoint(rank.directory / "grouped")
        found["storages"].append(_storages(experts))
        found["same"] = all(map(torch.equal, before, experts.parameters()))
    return found


def _storages(experts: Any) -> list[tuple[int, int]]:
    """Return for each projection the number of storages of its weights, and their bytes beyond the weights."""
    out = []
    for name in ("linear_fc1", "linear_fc2"):
        weights = [getattr(expert, name).weight for expert in experts.local_experts]
        storages = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in weights}
        out.append((len(storages), sum(storages.values()) - sum(w.nbytes for w in weights)))
    return out


def described(rank: Rank, model: str, targets: tuple[str, ...] | None) -> list[str]:
    with rank.actor(model, settings=settings(targets)) as actor:
        return [line for line in actor.describe() if line.startswith("experts")]


def frozen(rank: Rank) -> list[dict[str, Any]]:
    """Return the sizes of gradient buffers and optimizer states, next to those of the adapters."""
    from dppo_megatron.actor import Reference
    from dppo_megatron.hf.lora import adapters_of

    layouts = [{}, {"distributed_optimizer": False}] if rank.world_size == 1 else [{}, {"tensor": 2}]
    results = []
    for layout in layouts:
        with rank.actor("qwen3_moe", settings=settings(dtype="bf16"), **layout, sequence="tensor" in layout) as actor:
            batches = micro_batches(sequences(), 2)
            base = torch.cat(actor.logprobs(batches))
            fill(actor)
            reference = Reference(actor)
            before = [p.detach().clone() for c in actor.model_chunks for p in c.parameters() if not p.requires_grad]
            actor.train_update(batches, build_objective("nll"))
            after = [p for c in actor.model_chunks for p in c.parameters() if not p.requires_grad]
            own = sum(p.numel() for a in adapters_of(actor.model_chunks) for p in (a.A, a.B))
            buffers = [b for chunk in actor.model for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
            parts = [part.optimizer for part in actor.optimizer.chained_optimizers if part.optimizer is not None]
            states = sum(v.numel() for o in parts for s in o.state.values() for v in s.values() if torch.is_tensor(v))
            results.append(
                {
                    "own": own,
                    "gradients": sum(p.numel() for b in buffers for p in b.params),
                    "states": states,
                    "unchanged": all(map(torch.equal, before, after)),
                    "no_gradient": all(p.grad is None and not hasattr(p, "main_grad") for p in after),
                    "moved": float((torch.cat(actor.logprobs(batches)) - base).abs().max()),
                    "reference": float((torch.cat([s.logprob for s in reference.scores(batches)]) - base).abs().max()),
                    "other_chunks": len(actor.frozen_chunks),
                }
            )
    return results


def resume(rank: Rank) -> dict[str, Any]:
    """Save and continue, load and continue, in each layout: see `resumed`."""
    layouts: dict[str, dict] = {"experts": {"model": "qwen3_moe"}, "bf16": {"settings": settings(dtype="bf16")}}
    if rank.world_size == 2:
        layouts |= {
            "some": {"tensor": 2, "settings": settings(SOME)},
            "sequence": {"model": "qwen3_moe", "tensor": 2, "sequence": True},
            "plain": {"model": "qwen3_moe", "distributed_optimizer": False},
            "virtual": {"pipeline": 2, "virtual_pipeline": 2},
            "apart": {"model": "qwen3_moe", "expert": 2},
            "latent": {"model": "deepseek", "tensor": 2, "sequence": True, "settings": settings(LATENT)},
            "delta_net": {"model": "qwen3_5", "tensor": 2, "sequence": True, "settings": settings(DELTA_NET)},
        }

    def lose_all(actor: Any) -> None:
        for parameter in (p for chunk in actor.model_chunks for p in chunk.parameters()):
            parameter.data.zero_()  # the base comes back too

    given = {name: {"settings": settings(), **layout} for name, layout in layouts.items()}
    return {name: resumed(rank, name, layout, fill, lose_all) for name, layout in given.items()}


def continued(rank: Rank, layout: dict[str, Any], directory: Path, step: int) -> dict[str, Any]:
    """Train and save where there is no checkpoint yet, else go on from it in this layout."""
    with rank.actor("qwen3_moe", settings=settings(), **layout) as actor:
        fill(actor)
        if actor.load_checkpoint(directory) is None:
            train(actor, sequences(), updates=2)
            actor.save_checkpoint(directory, step, {"step": step}, keep=5)
        return train(actor, sequences(seed=1), updates=2)


def files(rank: Rank, model: str, targets: tuple[str, ...] | None, layout: dict[str, Any]) -> dict[str, Any]:
    """Log-probs of adapters that were filled, saved, and loaded by another actor; and of the merged model."""
    from dppo_megatron.hf import save_hf
    from dppo_megatron.hf.peft import save_peft

    batch = [pack(sequences())]
    with rank.actor(model, settings=settings(targets), **layout) as actor:
        start = actor.logprobs(batch)[0]
        fill(actor)
        found = {"start": start, "filled": actor.logprobs(batch)[0]}
        lora = actor.config.model.lora
        save_peft(actor.model_chunks, rank.directory / "adapter", actor.hf, lora, rank.models / model)
        save_hf(actor.model_chunks, rank.directory / "merged", rank.models / model)
    lora = {"lora": {**settings(targets)["lora"], "adapter": str(rank.directory / "adapter")}}
    with rank.actor(model, settings=lora, **layout) as actor:
        actor.load_start()
        found["loaded"] = actor.logprobs(batch)[0]
    with rank.actor(model, **layout) as actor:
        actor.load_hf(rank.directory / "merged")
        found["merged"] = actor.logprobs(batch)[0]
    return found
