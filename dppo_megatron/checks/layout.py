"""Rules of `parallel`: how ranks divide into groups."""

from __future__ import annotations

from dppo_megatron.config import Config


def problems(config: Config) -> list[str]:
    p = config.parallel
    out = []
    model_ranks = p.tensor * p.pipeline * p.context
    if p.world_size % model_ranks:
        out.append(
            f"parallel.world_size = {p.world_size}: not a multiple of tensor x pipeline x context = {model_ranks}; "
            "change one of them"
        )
    expert_ranks = (p.expert_tensor or p.tensor) * p.expert * p.pipeline
    if p.world_size % expert_ranks and (p.expert > 1 or p.expert_tensor):  # else the rule above implies it
        out.append(
            f"parallel.world_size = {p.world_size}: not a multiple of expert_tensor x expert x pipeline = "
            f"{expert_ranks}; change one of them"
        )
    if p.sequence and p.tensor == 1:
        out.append("parallel.sequence = true: needs parallel.tensor > 1; set it to false")
    if p.virtual_pipeline and p.pipeline == 1:
        out.append(f"parallel.virtual_pipeline = {p.virtual_pipeline}: needs parallel.pipeline > 1; remove it")
    for name in ("first_stage_layers", "last_stage_layers"):
        if getattr(p, name) and p.pipeline == 1:
            out.append(f"parallel.{name} = {getattr(p, name)}: needs parallel.pipeline > 1; remove it")
    return out
