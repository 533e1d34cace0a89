"""Rules of `objective`: a user's own can be built, and the other settings give what a method needs."""

from __future__ import annotations

from dppo_megatron.config import Config


def problems(config: Config, notes: list[str]) -> list[str]:
    """Add to `notes` the method in words and its differences from its paper. Return the problems."""
    from dppo_megatron.objectives import PRESETS, ObjectiveError, build_objective

    chosen = config.objective
    try:
        objective = build_objective(chosen.name, **chosen.settings)
    except ObjectiveError as error:  # of a user's own; presets and their axes are checked when a config is read
        return [f"objective.name = {chosen.name}: {error}"]
    try:
        notes.append(objective.describe())
    except Exception as error:  # a user's own
        return [f"objective.name = {chosen.name}: describe() failed: {type(error).__name__}: {error}"]
    if preset := PRESETS.get(chosen.name):
        for setting in ("advantage", "aggregation"):
            published, given = getattr(preset, setting), getattr(chosen, setting)
            if given != published:
                notes.append(f"objective.{setting} = {given}: {chosen.name} was published with {published}")
    out = []
    if objective.settings.supervised != chosen.supervised:
        out.append(_other_batches(chosen.name, objective.settings.supervised))
    if objective.needs_topk and config.rollout.topk_logprobs == 0:
        out.append(
            f"rollout.topk_logprobs = 0: objective {chosen.name} compares top-K tokens; set it to the K it should "
            "compare, e.g. 20"
        )
    if objective.needs_reference and config.model.lora.r and config.model.lora.adapter is not None:
        out.append(
            f"model.lora.adapter = {config.model.lora.adapter}: the reference of {chosen.name} would be the model "
            "without this adapter, not the start of training; merge it into model.path"
        )
    return out


def _other_batches(name: str, supervised: bool) -> str:
    """Return the problem of settings that contradict objective.name on given or sampled answers."""
    if supervised:
        return (
            f"objective.settings.supervised = true: objective.name = {name} learns from sampled rollouts; "
            "set objective.name to nll to learn from given answers"
        )
    return (
        f"objective.settings.supervised = false: objective.name = {name} learns from given answers; remove "
        "the setting, or choose a method that learns from rollouts"
    )
