"""`dppo-megatron sample`: fills a bank with the start model's answers to the training prompts, without a trainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from dppo_megatron.config import Config, ConfigError, with_settings
from dppo_megatron.config.distillation import DistillationConfig
from dppo_megatron.config.schema import ObjectiveConfig, ParallelConfig
from dppo_megatron.config.task import EvalConfig
from dppo_megatron.data.prompts import training_prompts
from dppo_megatron.data.tokenizer import load_tokenizer
from dppo_megatron.run.checks import check_run_dir, data, settings_problems
from dppo_megatron.run.checks.devices import fit_engines, gpu_problems, visible_devices
from dppo_megatron.run.checks.resume import record, unusable_directory
from dppo_megatron.run.checks.user_code import environment_problems, reward_problems
from dppo_megatron.run_dir import RunDir

from .launcher import RunPlan
from .local_processes import ProcessPlan, engine_plans
from .local_run import LocalRun

ANY_AGE = 10**9  # staleness limit without effect, because there is a single policy


def fill_bank(config: Config, source: str, *, n: int, prompts: int | None, out: Path | None, resume: bool) -> int:
    """Sample `n` answers to each of the first `prompts` prompts in training order; return the run's exit code.

    `prompts` defaults to every row in data.train. The run directory is `out`, by default `run.dir`/samples. Engines,
    retries, rewards, resume and the bank work as in a training run. Raises `ConfigError`.
    """
    config = fit_engines(sampling_only(config, n, out or config.run.dir / "samples"), visible_devices())
    notes: list[str] = []
    tools: list[dict[str, Any]] = []
    problems = settings_problems(config) + unusable_directory(config)
    problems += gpu_problems(config, visible_devices(), trains=False)
    problems += reward_problems(config) + environment_problems(config, tools, notes)
    problems += data.problems(config, None, notes, problems, tools)
    if config.model.weights is not None:
        problems.append(
            f"model.weights = {config.model.weights}: engines start from model.path; set that to a Hugging Face "
            "directory of these weights (dppo-megatron convert) and remove model.weights"
        )
    if config.data.more and prompts is None:
        problems.append("data.more: mixed files repeat without end; set --prompts")
    if problems:
        raise ConfigError(source, problems)
    available = len(training_prompts(config, load_tokenizer(config.model.path), tools))
    prompts = prompts or available
    steps = math.ceil(prompts / config.rollout.prompts_per_step)
    config = with_settings(config, train={"steps": steps})
    check_run_dir(config, source, resume=resume)
    run = RunDir(config.run.dir)
    plan = RunPlan(
        engines=engine_plans(config, trains=False),
        orchestrator=ProcessPlan("orchestrator", ("orchestrator", str(run.config), "--prompts", str(prompts))),
        trainers=[],
    )
    with run.take() as lock:
        record(config)
        return LocalRun(config, plan, lock, resume_command="the same command and --resume").run()


def sampling_only(config: Config, n: int, directory: Path) -> Config:
    """Return `config` with the default training and evaluation, so that one policy answers everything."""
    return with_settings(
        config,
        run={"dir": directory},
        parallel=ParallelConfig(),
        objective=ObjectiveConfig(),
        distillation=DistillationConfig(),
        train={"updates_per_step": 1},
        data={"eval": None},
        eval=EvalConfig(),
        rollout={
            **{"group_size": n, "bank": None, "dynamic_sampling": False},
            **{"max_staleness": ANY_AGE, "beyond_bound": "wait", "on_update": "keep"},
        },
        engine={"placement": "disaggregated"},
        weight_sync={"directory": None},
    )
