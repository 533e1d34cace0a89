"""`dppo-megatron eval`: greedy accuracy of a model directory on the config's held-out prompts."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from pathlib import Path

from dppo_megatron.checks.devices import gpu_problems, visible_devices
from dppo_megatron.checks.resume import unusable_directory
from dppo_megatron.common.process import exit_reason
from dppo_megatron.config import Config, ConfigError, save_resolved
from dppo_megatron.config.schema import ObjectiveConfig
from dppo_megatron.engines.kinds import build_engine
from dppo_megatron.fleet.registry import engine_urls
from dppo_megatron.observability.logs import last_lines
from dppo_megatron.orchestrator.main import evaluate_once
from dppo_megatron.run_dir import RunDir

from .driver import GRACE_S
from .local_processes import LocalLauncher, engine_plans

LAST_LINES = 25


def evaluate_model(config: Config, model: Path, source: str) -> float:
    """Starts the engines on `model` in a new directory under `run.dir`, evaluates once, and ends them.

    Raises `ConfigError` without `data.eval` or with too few GPUs, and `RuntimeError` with the engine's last lines
    when it does not start.
    """
    if config.data.eval is None:
        raise ConfigError(source, ["data.eval: not set; name a JSONL file of held-out prompts"])
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": model}),
            "engine": config.engine.model_copy(update={"urls": ()}),  # a running engine serves another policy
            # A run on given answers or given rollouts has no engines; its evaluation samples all the same.
            "objective": ObjectiveConfig(),
            "rollout": config.rollout.model_copy(update={"bank": None}),
        }
    )
    if problems := unusable_directory(config) + gpu_problems(config, visible_devices(), trains=False):
        raise ConfigError(source, problems)
    directory = _new_directory(config.run.dir / "eval", model.absolute().name)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": directory})})
    run = RunDir(directory)
    save_resolved(config, run.config)
    launcher = LocalLauncher(run)
    servers = [launcher.start(plan) for plan in engine_plans(config, trains=False)]

    def check() -> None:
        for server in servers:
            if (code := server.poll()) is not None:
                lines = "\n".join(last_lines(server.log, LAST_LINES))
                raise RuntimeError(f"{server.name} ended while starting ({exit_reason(code)}):\n{lines}")

    async def main() -> float:
        engines = [build_engine(config, url) for url in engine_urls(config, run, check)]
        try:
            return await evaluate_once(config, engines)
        finally:
            for engine in engines:
                await engine.close()

    try:
        return asyncio.run(main())
    finally:
        launcher.end(servers, GRACE_S)
        shutil.rmtree(run.quantized_start, ignore_errors=True)  # as large as the model, and of no more use


def _new_directory(parent: Path, name: str) -> Path:
    """NAME-1, NAME-2, ...: engines register in it, and those of another evaluation serve another model."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        try:
            (parent / f"{name}-{number}").mkdir(mode=0o700)
        except FileExistsError:
            continue
        return parent / f"{name}-{number}"
