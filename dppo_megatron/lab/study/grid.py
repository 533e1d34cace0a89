"""Reads the study file, and builds a config for each run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from dppo_megatron.config import Config, ConfigError, read_tree
from dppo_megatron.config.load import plain_words
from dppo_megatron.config.section import CountFromZero, FilePath, Section
from dppo_megatron.objectives.settings import nearest
from dppo_megatron.report.names import METRICS
from dppo_megatron.run.checks import load_config

Settings = dict[str, Any]  # dotted setting name -> value
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,60}$")]  # also names a directory


class StudyFile(Section):
    base: FilePath = Field(description="config of every run")
    settings: Settings = Field(default={}, description="of every run, on top of base")
    methods: dict[Name, Settings] = Field(min_length=1, description="the others are compared with the first one")
    conditions: dict[Name, Settings] = Field(default={"base": {}}, min_length=1)
    seeds: tuple[CountFromZero, ...] = Field(min_length=1, description="run.seed of the runs of each cell")
    metric: str = Field("eval/accuracy", pattern=r"^[\w@./+-]+$", description="its last value is compared")
    collapse: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5, description="a run collapsed when the metric ends below this share of its best value, or below its first"
    )
    share_engine: bool = Field(
        True, description="runs with equal engine settings share an engine, which loads the weights of each"
    )


@dataclass(frozen=True, slots=True)
class Cell:
    """Describes a study run."""

    method: str
    condition: str
    seed: int
    config: Config
    hash: str  # hash of all settings except defaults and run.dir

    @property
    def name(self) -> str:
        return f"{self.method}/{self.condition}/seed-{self.seed}"


@dataclass(frozen=True, slots=True)
class Study:
    file: StudyFile
    cells: tuple[Cell, ...]


def read_study(path: Path, directory: Path) -> Study:
    """Build all runs, each with a checked config and a run directory below `directory`.

    The seed varies slowest, so a stopped study has every method for some seeds. Raises `ConfigError` with every
    violation in the study file, or in the first invalid run.
    """
    tree, problems = read_tree(path)
    if {"run", "model"} & tree.keys():
        raise ConfigError(str(path), [f"the config of a run; write a study with base: {path}, methods and seeds"])
    try:
        file = StudyFile.model_validate(tree)
    except ValidationError as error:
        for e in error.errors():
            name, unknown = ".".join(map(str, e["loc"])) or "the file", e["type"] == "extra_forbidden"
            if unknown:
                reason = f"unknown; {nearest(name, StudyFile.model_fields)}"
            elif e["type"] == "dict_type" and name in ("methods", "conditions"):
                example = "grpo: {objective.name: grpo}" if name == "methods" else "small: {optimizer.lr: 1.0e-6}"
                reason = f"must be a mapping; write {{NAME: {{SETTING: VALUE}}}}, e.g. {{{example}}}"
            else:
                reason = plain_words(e)
            problems.append(f"{name}: {reason}")
    if problems:
        raise ConfigError(str(path), problems)
    cells = tuple(_cells(file, directory))
    first: dict[tuple[str, int, str], str] = {}
    for cell in cells:
        other = first.setdefault((cell.condition, cell.seed, cell.hash), cell.method)
        if other != cell.method:
            reason = f"the same settings as {other} in condition {cell.condition}; set e.g. objective.name"
            raise ConfigError(str(path), [f"methods.{cell.method} = {file.methods[cell.method]}: {reason}"])
    evaluation = cells[0].config.eval.sets or cells[0].config.data.eval
    metric_names = [metric.name for metric in METRICS if metric.name.startswith("eval/")]
    if re.fullmatch("eval/[^/]+", file.metric) and file.metric not in metric_names:
        raise ConfigError(str(path), [f"metric = {file.metric}: unknown; {nearest(file.metric, metric_names)}"])
    if file.metric.startswith("eval/") and not evaluation:
        raise ConfigError(str(path), [f"metric = {file.metric}: {file.base} has no held-out prompts; set data.eval"])
    return Study(file, cells)


def _cells(file: StudyFile, directory: Path) -> Iterator[Cell]:
    for seed in file.seeds:
        for condition, condition_settings in file.conditions.items():
            for method, method_settings in file.methods.items():
                settings = {**file.settings, **condition_settings, **method_settings, "run.seed": seed}
                settings["run.dir"] = str(directory / "runs" / method / condition / f"seed-{seed}")
                try:
                    config = load_config(file.base, overrides(settings))
                except ConfigError as error:
                    raise ConfigError(
                        f"{method} / {condition} / seed {seed}, on {file.base}", error.violations
                    ) from None
                yield Cell(method, condition, seed, config, _hash(config))


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """Format settings for `--set`; JSON is YAML."""
    return [f"{name}={json.dumps(value)}" for name, value in settings.items()]


def _hash(config: Config) -> str:
    """Hash the settings that are not defaults, so that stored hashes stay valid when a later version adds a setting."""
    tree = config.model_dump(mode="json", exclude_defaults=True)
    del tree["run"]["dir"]
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]
