"""Checks a config against rules. docs/adding.md lists which commands check each rule.

A rule file has one subject and a function `problems(config, ...)` that returns lines `setting = value: why; remedy`.
All problems that can be found are reported together, before a process starts. A rule imports torch only when needed,
because the node that drives a Slurm job may have no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dppo_megatron.config import Config, ConfigError, read_config
from dppo_megatron.report.trackers import missing_packages

from . import data, devices, distillation, effects, engine, exact, model, sampling, slurm, training, user_code
from .resume import check_run_dir, unusable_directory, unusable_weights_directory
from .resume import problems as run_dir_problems

__all__ = ["SETTINGS", "Place", "check_job", "check_run_dir", "load_config", "preflight", "settings_problems"]

SETTINGS = (sampling, engine, exact, training, distillation, effects)

Place = Literal["run", "node", "elsewhere", "unstaged"]


def settings_problems(config: Config) -> list[str]:
    """Return every broken rule between settings. Reads no files, uses no network, and imports no torch."""
    return [problem for rule in SETTINGS for problem in rule.problems(config)]


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read `path`, apply overrides (`a.b=value`, the value in YAML), and check types, names and rules between settings.

    Relative paths in the file are relative to the working directory, as on a command line. Raises `ConfigError` naming
    every violation. Reads no model or data files; `preflight` does.
    """
    config = read_config(path, overrides)
    if problems := settings_problems(config):
        raise ConfigError(str(path), problems)
    return config


def preflight(config: Config, source: str, *, place: Place = "run") -> list[str]:
    """Check settings, objective, model directory, engine, prompts and reward; for a whole run, also this machine.

    `place` is the part of the run on this machine:

    - "run": the whole run, so GPUs must suffice and ports be free
    - "node": one of several nodes
    - "elsewhere": no part; the run uses other GPUs
    - "unstaged": no part, and absent model and data files are only notes

    Starts no run. Returns notes for the user (sizes, the method, the data). Raises `ConfigError` with every violation.
    """
    r, updates = config.rollout, config.train.updates_per_step
    step = f"a step: rollout.prompts_per_step {r.prompts_per_step} x rollout.group_size {r.group_size} = "
    step += f"{r.prompts_per_step * r.group_size} samples, in {updates} updates (train.updates_per_step)"
    notes = [] if config.objective.supervised else [step]
    notes += training.size_notes(config)
    absent: list[str] = []  # problems of files that may still be copied here
    tools: list[dict[str, Any]] = []
    hf, elsewhere = model.read(config), place in ("elsewhere", "unstaged")
    rules: list[Callable[[], Iterable[str]]] = [
        partial(unusable_directory, config),
        *([] if elsewhere else [partial(unusable_weights_directory, config)]),
        partial(user_code.objective_problems, config, notes),
        partial(model.problems, config, hf, absent, elsewhere=elsewhere),
        partial(exact.model_problems, config, hf, elsewhere=elsewhere),
        partial(missing_packages, config.tracking),
        partial(engine.environment_problems, config, elsewhere=elsewhere),
        partial(engine.model_problems, config, hf),
        partial(distillation.model_problems, config),
        partial(user_code.environment_problems, config, tools, notes),  # the tools are needed to render the prompts
        partial(data.problems, config, hf, notes, absent, tools),
        partial(user_code.reward_problems, config),
    ]
    notes += [*training.precision_notes(config, local=place == "run"), *effects.notes(config)]
    if place == "run":
        rules.append(partial(devices.problems, config))
        notes += devices.unreached(config)
    rule_problems = [problem for rule in rules for problem in _check(rule)]
    if place == "unstaged":
        notes += [f"not checked: {line}" for line in absent]
    else:
        rule_problems = absent + rule_problems
    if problems := settings_problems(config) + rule_problems:
        raise ConfigError(source, [*dict.fromkeys(problems), *_started_elsewhere(config, source)])
    return notes


def check_job(
    config: Config, source: str, *, resume: bool, nodes: tuple[int, ...] | None = None, gpus: int | None = None
) -> list[str]:
    """Check settings, nodes and the run directory of a Slurm job; return notes.

    `slurm.problems` describes `nodes` and `gpus`. Raises `ConfigError` with every violation. Needs no torch.
    """
    notes: list[str] = []
    problems = settings_problems(config) + slurm.problems(config, nodes, gpus, notes)
    if problems := problems + run_dir_problems(config, resume=resume):
        raise ConfigError(source, problems)
    return notes


def _started_elsewhere(config: Config, source: str) -> list[str]:
    """Return a problem if relative paths and modules exist only in a directory above the config."""
    names = (config.reward.name, config.objective.name, config.environment.source)
    modules = [Path(f"{name.partition(':')[0].replace('.', '/')}.py") for name in names if name and ":" in name]
    paths = [config.model.path, config.model.weights, config.data.train, config.data.eval]
    absent = [path for path in paths if path and not path.exists()]
    absent += [path for path in modules if not any(Path(start, path).exists() for start in (".", *sys.path))]
    for directory in Path(source).absolute().parents:
        if matches := [str(path) for path in absent if not path.is_absolute() and (directory / path).exists()]:
            reason = f"relative paths begin there; {', '.join(matches)}: in {directory}"
            return [f"working directory = {Path.cwd()}: {reason}; start the command there"]
    return []


def _check(rule: Callable[[], Iterable[str]]) -> list[str]:
    """Return the rule's problems. A rule that raises becomes a problem itself and does not hide the others."""
    try:
        return list(rule())
    except (ValueError, OSError, ImportError) as error:
        return [str(error)]
