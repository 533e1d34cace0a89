"""Checks that names in `objective`, `reward` and `environment` lead to code that the settings can build."""

from __future__ import annotations

import inspect
from contextlib import suppress
from functools import partial
from typing import Any

from dppo_megatron.config import Config


def objective_problems(config: Config, notes: list[str]) -> list[str]:
    """Return why the objective cannot be built or does not suit the settings.

    Adds to `notes` the method in words, and differences from the published method.
    """
    from dppo_megatron.objectives import PRESETS, ObjectiveError, build_objective

    section = config.objective
    try:
        objective = build_objective(section.name, **section.settings)
    except ObjectiveError as error:  # only from custom objectives, because presets are checked when a config is read
        return [f"objective.name = {section.name}: {error}"]
    try:
        notes.append(objective.describe().partition("\n")[0].removeprefix("objective "))
    except Exception as error:  # custom code may raise anything
        return [f"objective.name = {section.name}: describe() failed: {type(error).__name__}: {error}"]
    if preset := PRESETS.get(section.name):
        settings = [name for name in ("advantage", "aggregation") if getattr(section, name) != getattr(preset, name)]
        if settings:
            chosen_here = ", ".join(f"objective.{name} = {getattr(section, name)}" for name in settings)
            options = " ".join(f"--set objective.{name}={getattr(preset, name)}" for name in settings)
            notes.append(f"warning: {chosen_here}: not {section.name} as it was published; for that add {options}")
    out = []
    if objective.settings.supervised != section.supervised:
        learns, remedy = "given answers", "remove the setting, or choose a method that learns from rollouts"
        if objective.settings.supervised:
            learns, remedy = "sampled rollouts", "set objective.name to nll to learn from given answers"
        out.append(
            f"objective.settings.supervised = {str(objective.settings.supervised).lower()}: objective.name = "
            f"{section.name} learns from {learns}; {remedy}"
        )
    out += _column_problems(section.name, objective.needs_columns)
    if objective.needs_topk and config.rollout.topk_logprobs == 0:
        out.append(
            f"rollout.topk_logprobs = 0: objective {section.name} compares top-K tokens; set it to the K it should "
            "compare, e.g. 20"
        )
    needs_teacher = objective.needs_teacher or any(name.startswith("teacher_") for name in objective.needs_columns)
    if config.samples and needs_teacher != bool(config.distillation.teachers):
        problem = (
            "learns from a teacher; add one to distillation.teachers"
            if needs_teacher
            else "uses none; set objective.settings.distillation, or remove it"
        )
        out.append(
            f"distillation.teachers = {sorted(config.distillation.teachers)}: objective {section.name} {problem}"
        )
    if objective.needs_reference and config.model.lora.r and config.model.lora.adapter is not None:
        out.append(
            f"model.lora.adapter = {config.model.lora.adapter}: the reference of {section.name} would be the model "
            "without this adapter, not the start of training; merge it into model.path"
        )
    return out


def _column_problems(name: str, columns: Any) -> list[str]:
    """Return why columns that an objective needs are not available."""
    from dppo_megatron.objectives.contract import ObjectiveProtocol
    from dppo_megatron.objectives.settings import nearest
    from dppo_megatron.types import COLUMNS

    where = f"objective.name = {name}: needs_columns = {columns!r}"
    if isinstance(columns, str) or not all(isinstance(column, str) for column in columns):
        return [f"{where}: write a tuple of names"]
    batch_columns = {column.name: column for column in COLUMNS if column.packed}
    inputs = inspect.signature(ObjectiveProtocol.__call__).parameters.keys() - {"teacher_logprob"}
    return [
        f"{where}: {column!r} is an input of the call; remove it here, or give the column another name"
        if column in inputs
        else f"{where}: {column!r} is no column of a batch: {nearest(column, batch_columns)}"
        for column in columns
        if column in inputs or column not in batch_columns
    ]


def reward_problems(config: Config) -> list[str]:
    """Return why a reward cannot be built. A separate process imports the user's modules first."""
    from dppo_megatron.rollout.rewards import RewardError, build_rewards, import_problem

    if not config.samples:
        return []
    named = {"": config.reward}
    named |= {f"eval.sets.{name}: ": eval_set.reward for name, eval_set in config.eval.sets.items() if eval_set.reward}
    out = []
    for prefix, reward in named.items():
        problem = import_problem(reward)
        if problem is None:
            try:
                build_rewards(reward)
            except RewardError as error:
                problem = str(error)
        if problem is not None:
            out.append(prefix + problem)
    return out


def environment_problems(config: Config, tools: list[dict[str, Any]], notes: list[str]) -> list[str]:
    """Return why a separate process cannot create the environment, or the model cannot call its tools.

    Adds the environment's tools to `tools`. Adds to `notes` tools without a description, and that an agent cannot use
    tools.
    """
    from dppo_megatron.data.prompts import render_chat
    from dppo_megatron.data.tokenizer import TokenizerError, load_tokenizer
    from dppo_megatron.rollout.environments.tool_messages import tools_problem
    from dppo_megatron.rollout.environments.worker import environment_problem

    environment, data = config.environment, config.data
    if environment.source is None or not config.samples:
        return []
    if environment.name is not None and environment.agent is not None:
        return [
            f"environment.agent = {environment.agent}: environment.name is {environment.name}, but a trajectory uses "
            "only one of them; remove the other"
        ]
    out = []
    if environment.agent is not None and not data.chat_template:
        out.append(
            f"environment.agent = {environment.agent}: a chat template must format an agent's messages; set "
            "data.chat_template = true"
        )
    if environment.agent is None and data.chat_template and data.overlong == "truncate":
        out.append(
            "data.overlong = truncate: an environment continues the whole prompt, which a chat template formats again "
            "for every turn; use refuse or drop"
        )
    by_turn = config.objective.credit == "turn"
    problem = environment_problem(environment, tools, chat=data.chat_template, by_turn=by_turn)
    if silent := [tool["function"]["name"] for tool in tools if not tool["function"]["description"]]:
        lacking = f"{', '.join(silent)} without a docstring"
        notes.append(f"warning: {environment.described}: {lacking}; write one, which tells the policy their use")
    if problem is None and data.chat_template and (tools or environment.agent):
        unusable = None
        with suppress(TokenizerError):  # `data.problems` reports it
            unusable = tools_problem(partial(render_chat, load_tokenizer(config.model.path)))
        if unusable and tools:
            problem = f"{environment.described}: has tools, but {unusable}, or give the environment `step` instead"
        elif unusable:
            notes.append(f"warning: {environment.described}: its requests with tools will be rejected: {unusable}")
    return [*out, problem] if problem else out
