"""Saves Megatron's optimizer state, and loads it in another layout.

This module handles three limits: Megatron describes only state that exists, leaves out a torch optimizer's `step`, and
saves unsharded state only from rank 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from . import optimizer_shards
from .directory import CheckpointError


def sharded_optimizer_state(
    optimizer: MegatronOptimizer, weights: dict[str, Any], metadata: dict[str, Any], *, loading: bool
) -> dict[Any, Any]:
    """Return sharded tensors that describe this rank's part; with `loading` they are empty. Collective.

    weights: the model's sharded state dict.
    metadata: as Megatron's `sharded_state_dict` takes it.
    """
    materialise_state(optimizer)
    states = [
        optimizer_shards.sharded_state_dict(part, weights, loading=loading)
        if isinstance(part, DistributedOptimizer)
        else part.sharded_state_dict(weights, is_loading=loading, metadata=metadata)
        for part in _parts(optimizer)
    ]
    return dict(enumerate(states)) if len(states) > 1 else states[0]


def host_copies(state: dict[Any, Any]) -> Iterator[Tensor]:
    """Yield the host copies that `sharded_optimizer_state` made; only the checkpoint uses them."""
    for part in [state] if "optimizer" in state else state.values():
        for shards in part.get("param_state", {}).values():
            yield from (shard.data for shard in shards.values())


def load_optimizer_state(optimizer: MegatronOptimizer, loaded: dict[Any, Any]) -> None:
    """Load state that was read into the tensors from `sharded_optimizer_state`. Collective.

    Raises CheckpointError if the number of ranks with experts has changed and the distributed optimizer is off.
    """
    parts = _parts(optimizer)
    for part, state in zip(parts, _states_of_parts(parts, loaded), strict=True):
        # Megatron copies every entry of the inner state, but did not save a torch optimizer's `step` as a tensor.
        # `step` comes with the groups, before the rest.
        tensors = state.pop("param_state", {})
        _set_rates(part, state)
        part.load_state_dict(state)
        inner = part.optimizer
        steps = {p: inner.state[p].pop("step") for p in inner.state if "step" in inner.state[p]}
        if isinstance(part, DistributedOptimizer):
            optimizer_shards.load_states(part, tensors)
        elif isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            steps = dict.fromkeys(inner.state, 0) | steps  # the plain optimizers omit some parameters
        for parameter, step in steps.items():
            # A shared tensor would advance once per parameter.
            inner.state[parameter]["step"] = torch.as_tensor(step, dtype=torch.float32).clone()


def _set_rates(part: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Replace the rates in the loaded state by `part`'s rates, because Megatron-core 0.19 identifies groups by them."""
    first_group = part.optimizer.param_groups[0]  # the same in all groups
    for group in state.get("optimizer", state)["param_groups"]:
        group.update({name: first_group[name] for name in ("max_lr", "min_lr") if name in first_group})


def _states_of_parts(parts: list[MegatronOptimizer], loaded: dict[Any, Any]) -> list[dict[str, Any]]:
    """Return the state of each optimizer on this rank.

    Sharded tensors are as this rank described them. Everything else is as global rank 0 saved it: for a single
    optimizer, or by number for a dense and an expert optimizer. A rank has an expert optimizer only if it has experts
    in an expert-parallel group, so saver and loader may have different numbers of optimizers.
    """
    numbered = len(parts) > 1
    if not all(isinstance(part, DistributedOptimizer) for part in parts):
        if numbered != (0 in loaded):
            raise CheckpointError(
                "parallel.distributed_optimizer = false: this rank's optimizer state has another form than the saved "
                "one, because experts are on other ranks; use the checkpoint's parallel.expert and parallel.pipeline"
            )
        return [loaded[index] for index in range(len(parts))] if numbered else [loaded]
    saved = [loaded] if "optimizer" in loaded else [loaded[i] for i in (0, 1) if "optimizer" in loaded.get(i, {})]
    part_states = [loaded[index] for index in range(len(parts))] if numbered else [loaded]
    if len(saved) == len(parts):
        return part_states
    groups = {_group_key(group): group for state in saved for group in state["optimizer"]["param_groups"]}
    states = []
    for part, tensors in zip(parts, part_states, strict=True):
        # Dense and expert parameters have the same settings and the same number of steps.
        param_groups = [
            {**groups[_group_key(g)], "is_expert_parallel": g["is_expert_parallel"]}
            for g in part.optimizer.param_groups
        ]
        common = {name: value for name, value in saved[0].items() if name not in (0, 1, "param_state")}
        common["optimizer"] = {**common["optimizer"], "param_groups": param_groups}
        states.append({**common, "param_state": tensors.get("param_state", {})})
    return states


def _group_key(group: dict[str, Any]) -> tuple[Any, ...]:
    """Return the settings that make an update treat groups differently."""
    return tuple(group.get(name, group.get(f"pre_{name}")) for name in ("wd_mult", "lr_mult", "is_decoupled_lr"))


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the non-empty optimizers for dense and expert parameters.

    If only other stages have experts, a stage has an empty expert optimizer, which Megatron cannot describe.
    """
    return [part for part in optimizer.chained_optimizers if _holds_parameters(part)]


def _holds_parameters(part: MegatronOptimizer) -> bool:
    if part.optimizer is None:
        return False
    if isinstance(part, DistributedOptimizer):
        return bool(part.buffers)  # other ranks' shares count too: all ranks that share a buffer must agree
    return any(group["params"] for group in part.optimizer.param_groups)


def materialise_state(optimizer: MegatronOptimizer) -> None:
    """Create Adam state at step 0, as the first update would, because Megatron can describe only state that exists."""
    for part in _parts(optimizer):
        inner = part.optimizer
        if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            part.init_state_fn(inner, part.config)  # Megatron knows the state of the fused implementations
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter].update(
                        step=torch.zeros((), dtype=torch.float32),
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros_like(parameter),
                    )
