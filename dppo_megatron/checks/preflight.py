"""Which rule is checked when. Everything that can be known to be wrong is reported at once, before a process starts.

| rules | what they need | checked by |
|---|---|---|
| types, names, the objective's axes (`config.schema`) | the config | every command, when it reads its config |
| between settings (`SETTINGS` below) | the config | every command, when it reads its config |
| `objective`, `model`, `interpreter`, `serving`, `data`, `reward` | files, torch | `train`, `validate`, `slurm` |
| `devices`, `ports` | this machine | the same, where this machine runs all of it; `eval` checks `devices` |
| `slurm` | the config | `slurm` and the job it submits |
| `resume` | the run directory | `train`, `slurm` and its job |

`config` knows the tree alone and stands below the objectives' and engines' rooms, so reading with rules is here.
What is only known later is checked where it becomes known: the cluster of a plan (`plan.engines`), Slurm's nodes
(`slurm.placement`), the number of started ranks (`actor.layout`), the limit of open files (`orchestrator.open_files`),
a running server (`engines`), samples of a given bank (`trainer.batches`), a checkpoint's batch (`trainer.checkpoints`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Literal

from dppo_megatron.config import Config, ConfigError, read_config

from . import (
    data,
    devices,
    engine,
    interpreter,
    layout,
    model,
    objective,
    ports,
    precision,
    reward,
    sampling,
    serving,
    training,
)

SETTINGS = (layout, sampling, engine, precision, training)

Place = Literal["run", "node", "elsewhere"]


def settings_problems(config: Config) -> list[str]:
    """Every broken rule between settings. Pure: no files, no network, no torch."""
    return [problem for rule in SETTINGS for problem in rule.problems(config)]


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Reads `path`, applies overrides (`a.b=value`, the value in YAML), checks types, names and rules between settings.

    Relative paths in the file are relative to the working directory, as on a command line.
    Raises `ConfigError` naming every violation. Reads no model or data files; `preflight` does.
    """
    config = read_config(path, overrides)
    if problems := settings_problems(config):
        raise ConfigError(str(path), problems)
    return config


def preflight(config: Config, source: str, *, place: Place = "run") -> list[str]:
    """Checks settings, objective, model directory, engine, prompts, reward and, for a whole run, this machine.

    `place`: this machine is that of the whole "run", so GPUs must suffice and ports be free; it is one "node" of
    several; or the run is "elsewhere", on GPUs that this machine need not have. Starts nothing. Returns notes worth
    showing (the method in words, the data). Raises `ConfigError` with every violation.
    """
    notes: list[str] = []
    hf = model.read(config)
    rules = [
        partial(objective.problems, config, notes),
        partial(model.problems, config, hf, elsewhere=place == "elsewhere"),
        partial(interpreter.problems, config),
        partial(serving.problems, config, hf),
        partial(data.problems, config, hf, notes),
        partial(reward.problems, config),
    ]
    if place == "run":
        rules += [partial(devices.problems, config), partial(ports.problems, config)]
    problems = settings_problems(config) + [problem for rule in rules for problem in _check(rule)]
    if problems:
        raise ConfigError(source, list(dict.fromkeys(problems)))
    return notes


def _check(rule: Callable[[], list[str]]) -> list[str]:
    """The rule's problems; a rule that cannot be checked reports why, and does not hide the others."""
    try:
        return rule()
    except (ValueError, OSError, ImportError) as error:
        return [str(error)]
