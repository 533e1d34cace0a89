"""`dppo-megatron eval`: evaluates any model on the config's held-out sets, with new or running engines."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dppo_megatron.common.files import numbered_directory, read_json, write_json
from dppo_megatron.config import Config, ConfigError, read_config, with_settings
from dppo_megatron.config.schema import ObjectiveConfig
from dppo_megatron.convert.files import checkpoint_at, fingerprint_of, template_for
from dppo_megatron.rollout.engines.kinds import build_engine
from dppo_megatron.rollout.engines.protocol import Engine, EngineIncompatible
from dppo_megatron.rollout.fleet.registry import forget_all
from dppo_megatron.rollout.orchestrator.main import evaluate_once
from dppo_megatron.run.checks import sampling
from dppo_megatron.run.checks.devices import fit_engines, gpu_problems, visible_devices
from dppo_megatron.run.checks.resume import changed_settings, record, unusable_directory
from dppo_megatron.run_dir import RunDir

from .own_engines import running_engines

MODEL = "model.json"  # identifies the evaluated model

Metrics = dict[str, dict[str, float]]  # evaluation set -> metric -> value


def evaluate_model(
    config: Config, model: Path | None, source: str, *, urls: Sequence[str] = (), resume: bool = False
) -> Metrics:
    """Evaluate `model`, a Hugging Face directory or a run's checkpoint, and return the metrics on every set.

    Starts the engines in a new directory under `run.dir`, or with `resume` in this model's newest directory, evaluates
    once, and terminates the engines. With `urls`, uses these engines, which must serve no run meanwhile. They load
    `model`, or keep the model that they serve if `model` is None.

    Raises `ConfigError` without sets, with too few GPUs, or if the interrupted evaluation was different. Raises the
    errors of `running_engines` for engines that do not start.
    """
    if not config.eval_sets:
        raise ConfigError(source, ["data.eval: not set, and eval.sets is empty; name a file of held-out prompts"])
    run_dir = RunDir(config.run.dir)
    # A run on given answers or given rollouts has no engines, but the evaluation samples.
    config = with_settings(config, objective=ObjectiveConfig(), rollout={"bank": None}, engine={"urls": tuple(urls)})
    if model is not None:
        config = with_settings(config, weight_sync={"lora": "merged"})  # engines load only whole models
    if urls:
        config = with_settings(config, engine={"count": 1, "secret_file": config.engine.secret_file or run_dir.secret})
    config = fit_engines(config, visible_devices())
    problems = [*sampling.lengths(config), *sampling.eval_problems(config), *unusable_directory(config)]
    if problems := problems + gpu_problems(config, visible_devices(), trains=False):
        raise ConfigError(source, problems)
    name, identity = "running", {"engines": list(urls)}
    if model is not None:  # the fingerprint changes when other weights are written to the same path
        name = model.absolute().name
        identity = fingerprint_of(model if (model / "config.json").is_file() else checkpoint_at(model))
    directory = numbered_directory(config.run.dir / "eval", name, resume)
    config = with_settings(config, run={"dir": directory})
    if model is not None:
        model = _as_hugging_face(model, directory)
        config = with_settings(config, model={"path": model, "weights": None})
    run = RunDir(directory)
    if run.config.exists():
        problems = changed_settings(config, read_config(run.config))
        if read_json(directory / MODEL) != identity:
            problems.append(f"{directory}: the evaluation to resume has other weights; start one without --resume")
        if problems:
            raise ConfigError(source, problems)
        forget_all(run)
    write_json(directory / MODEL, identity)
    record(config)
    try:
        with running_engines(config, trains=False) as answering:
            return asyncio.run(_evaluate(config, answering, model if urls else None, identity))
    finally:
        shutil.rmtree(run.quantized_start, ignore_errors=True)  # as large as the model, and not needed again


async def _evaluate(config: Config, urls: Sequence[str], load: Path | None, identity: Any) -> Metrics:
    engines = [build_engine(config, url) for url in urls]
    try:
        version = 0
        if config.engine.urls:
            version, identity = await _take(config, engines, load, identity)
        return await evaluate_once(config, engines, identity, version)
    finally:
        for engine in engines:
            await engine.close()


async def _take(config: Config, engines: Sequence[Engine], load: Path | None, identity: Any) -> tuple[int, Any]:
    """Check that running engines suit the evaluation and serve one policy; return policy version and identity."""
    if load is not None:
        await asyncio.gather(*(engine.load_weights(load.absolute(), 0) for engine in engines))
    infos = await asyncio.gather(*(engine.check_compatible(config) for engine in engines))
    if len(versions := {info.version for info in infos}) > 1:
        raise EngineIncompatible(f"the engines serve several versions, {sorted(versions)}; name engines of only one")
    # An instance may have loaded a policy after it started, but all instances serve the same version.
    served = [] if load else sorted((info.model, info.instance) for info in infos)
    return infos[0].version, {"identity": identity, "served": served}


def _as_hugging_face(model: Path, directory: Path) -> Path:
    """Return `model` itself or, for a checkpoint, a converted Hugging Face directory in `directory`.

    Raises `ModelError` if `model` is neither.
    """
    if (model / "config.json").is_file():
        return model
    from dppo_megatron.convert.job import ConversionWorker, convert
    from dppo_megatron.convert.to_hf import ToHF

    converted = directory / "weights"
    if not converted.exists():
        checkpoint = checkpoint_at(model)
        convert(partial(ToHF, checkpoint, converted, template_for(checkpoint)), resume=True, worker=ConversionWorker())
    return converted
