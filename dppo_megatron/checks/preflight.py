"""Everything that can be known to be wrong before a process starts, reported at once."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dppo_megatron.config import Config, ConfigError, with_absolute_paths
from dppo_megatron.config.checks import cross_field_violations
from dppo_megatron.config.load import read_config
from dppo_megatron.fleet.registry import port_in_use
from dppo_megatron.run_dir import RunDir

from .devices import device_problem, visible_devices

if TYPE_CHECKING:  # a Slurm driver's environment, which imports this module, may have no torch
    from dppo_megatron.hf import HFModelConfig

# Changing these between attempts of a run is safe; anything else would make the second attempt another run.
RESUMABLE_CHANGES = (
    "train.steps",
    "tracking",
    "checkpoint",
    "eval.every",
    "engine",
    "parallel",
    "slurm",
    "weight_sync",
    "run.stall_timeout_s",
    "train.micro_batch_tokens",
    "optimizer.lr",
    "optimizer.min_lr",
    "optimizer.offload",
    "model.recompute",
    "model.logits",
    "rollout.max_concurrent_groups",
    "rollout.max_prompts_per_group",
    "reward.timeout_s",
    "reward.workers",
)

Place = Literal["run", "node", "elsewhere"]


@dataclass(frozen=True, slots=True)
class Findings:
    """`hf`: None when model.path is no model, which is then among the violations."""

    hf: HFModelConfig | None
    violations: list[str]
    notes: list[str]


def preflight(config: Config, source: str, *, place: Place = "run") -> list[str]:
    """Checks the rules between settings, objective, model directory, tokenizer, prompts and reward.

    `place`: this machine is that of the whole "run", so GPUs must suffice and ports be free; it is one "node" of
    several; or the run is "elsewhere", on GPUs that this machine need not have. Starts nothing. Returns notes worth
    showing (the method in words, the data). Raises `ConfigError` with every violation.
    """
    findings = Findings(_hf_config(config), cross_field_violations(config), [])
    checks = {
        "run": (_objective, _model, _engine, _data, _reward, _devices, _ports),
        "node": (_objective, _model, _engine, _data, _reward),
        "elsewhere": (_objective, _model_elsewhere, _engine, _data, _reward),
    }
    for check in checks[place]:
        try:
            check(config, findings)
        except (ValueError, OSError, ImportError) as error:
            findings.violations.append(str(error))
    if findings.violations:
        raise ConfigError(source, list(dict.fromkeys(findings.violations)))
    return findings.notes


def _hf_config(config: Config) -> HFModelConfig | None:
    from dppo_megatron.hf import ModelError, read_hf_config

    try:
        return read_hf_config(config.model.path)
    except ModelError:
        return None


def _objective(config: Config, findings: Findings) -> None:
    from dppo_megatron.objectives import PRESETS, ObjectiveError, build_objective

    chosen = config.objective
    try:
        objective = build_objective(chosen.name, **chosen.settings)
    except ObjectiveError as error:
        setting = f"settings = {chosen.settings}" if chosen.name in PRESETS else f"name = {chosen.name}"
        findings.violations.append(f"objective.{setting}: {error}")
        return
    if objective.settings.supervised != chosen.supervised:
        findings.violations.append(_other_batches(chosen.name, objective.settings.supervised))
    findings.notes.append(objective.describe())
    if preset := PRESETS.get(chosen.name):
        for setting in ("advantage", "aggregation"):
            published, given = getattr(preset, setting), getattr(chosen, setting)
            if given != published:
                findings.notes.append(f"objective.{setting} = {given}: {chosen.name} was published with {published}")
    if objective.needs_topk and config.rollout.topk_logprobs == 0:
        findings.violations.append(
            f"rollout.topk_logprobs = 0: objective {config.objective.name} compares listed tokens; set it to the K "
            "it should list, e.g. 20"
        )


def _other_batches(name: str, supervised: bool) -> str:
    """Whether answers are given or sampled goes by objective.name; the objective's settings say the opposite."""
    if supervised:
        return (
            f"objective.settings.supervised = true: objective.name = {name} learns from sampled rollouts; "
            "set objective.name to nll to learn from given answers"
        )
    return (
        f"objective.settings.supervised = false: objective.name = {name} learns from given answers; remove "
        "the setting, or choose a method that learns from rollouts"
    )


def _model(config: Config, findings: Findings) -> None:
    from dppo_megatron.actor import check_model
    from dppo_megatron.hf import ModelError, open_weights

    problems = check_model(config)  # also why `findings.hf` is None
    findings.violations.extend(problems)
    if config.model.weights is not None and not problems:
        try:
            open_weights(config.model.weights, findings.hf)
        except ModelError as error:
            findings.violations.append(f"model.weights = {error}")


def _model_elsewhere(config: Config, findings: Findings) -> None:
    """Asks of the GPU what `slurm.gpu` tells; one of an unknown kind is taken for one that computes everything."""
    from dppo_megatron.actor.precision import RECIPES, precision_problems
    from dppo_megatron.common.hardware import hardware
    from dppo_megatron.plan.ranks import buildable_here

    kind = config.slurm.gpu
    capability = hardware(kind).capability if kind else max(recipe.capability for recipe in RECIPES.values())
    asked = precision_problems(config, capability)
    _model(buildable_here(config), findings)
    findings.violations.extend(problem for problem in asked if problem not in findings.violations)


def _engine(config: Config, findings: Findings) -> None:
    from dppo_megatron.engines.serving import serving_problems

    if not config.samples:
        return
    if not config.engine.urls and (problem := _missing_engine(config)):
        findings.violations.append(problem)
    if findings.hf is not None:
        findings.violations.extend(serving_problems(findings.hf, config))


def _missing_engine(config: Config) -> str | None:
    """Why the interpreter that is to run the server cannot, or None."""
    from dppo_megatron.engines.kinds import server_python

    kind, python = config.engine.kind, server_python(config)
    remedy = f"install {kind} there, or set engine.python to the interpreter of an environment that has it"
    if kind == "sglang":
        remedy += "; `make sglang` builds one for the CPU in .venv-sglang"
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({kind!r}) is None)"
    try:
        found = subprocess.run([python, "-c", look], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"engine.python = {python}: cannot be run ({error}); {remedy}"
    return None if found else f"engine.kind = {kind}: {python} has no package {kind}; {remedy}"


def _data(config: Config, findings: Findings) -> None:
    from dppo_megatron.data.prompts import PromptSource
    from dppo_megatron.data.tokenizer import TokenizerError, load_tokenizer

    tokenizer = None
    try:
        tokenizer = load_tokenizer(config.model.path)
    except TokenizerError as error:
        if findings.hf is not None:
            findings.violations.append(str(error))
    for name in ("train", "eval"):
        path = getattr(config.data, name)
        if path is None:
            continue
        if not path.is_file():
            findings.violations.append(f"data.{name} = {path}: no such file; it must hold one JSON object a line")
        elif tokenizer is not None:
            try:
                prompts = len(PromptSource(path, tokenizer, config.data, config.run.seed))
            except ValueError as error:
                findings.violations.append(str(error))
            else:
                findings.notes.append(f"data.{name}: {prompts} prompts from {path}")


def _reward(config: Config, findings: Findings) -> None:
    from dppo_megatron.rewards import build_reward

    if config.samples:
        build_reward(config.reward)


def _devices(config: Config, findings: Findings) -> None:
    visible = visible_devices()
    if problem := device_problem(config, visible):
        findings.violations.append(problem)
    engine = config.engine
    if config.samples and engine.quantization != "none" and not engine.urls and not visible:
        findings.violations.append(
            f"engine.quantization = {engine.quantization}: needs a GPU, {engine.kind} does not multiply in FP8 on "
            "CPUs; set it to none"
        )


def _ports(config: Config, findings: Findings) -> None:
    engine = config.engine
    if not config.samples or engine.urls or not engine.port:
        return
    for port in range(engine.port, engine.port + engine.count):
        if port_in_use(engine.host, port):
            findings.violations.append(
                f"engine.port = {port}: already in use on {engine.host}; choose another, or 0 for a free one"
            )


def check_run_dir(config: Config, source: str, *, resume: bool) -> None:
    """Refuses a fresh run in the directory of an old one, and a resume that would be another run."""
    saved = RunDir(config.run.dir).config
    if resume and saved.exists():
        check_resume(config, read_config(saved), source)  # rules may be newer than the run
    else:
        check_fresh(config, source)


def check_resume(config: Config, saved: Config, source: str) -> None:
    """Refuses a resume under settings that would make it another run. Raises `ConfigError` naming each."""
    before, now = (_flat(with_absolute_paths(c).model_dump(mode="json")) for c in (saved, config))
    violations = [
        f"{key} = {now.get(key)!r}: the run was started with {before.get(key)!r}; use that or another run.dir"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key) and not _resumable(key)
    ]
    if violations:
        raise ConfigError(source, violations)


def check_fresh(config: Config, source: str) -> None:
    """Refuses to mix a new run into the directory of an old one. Raises `ConfigError`."""
    run = RunDir(config.run.dir)
    if run.bank.exists() or run.checkpoints.exists():
        raise ConfigError(
            source,
            [f"run.dir = {run.root}: already holds a run; pass --resume to continue it, or choose another run.dir"],
        )


def _resumable(key: str) -> bool:
    return any(key == allowed or key.startswith(allowed + ".") for allowed in RESUMABLE_CHANGES)


def _flat(tree: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
