"""Checks the run directory. A resumed run must be the same run, and a new run needs its own directory."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase

from dppo_megatron.config import Config, ConfigError, read_config, with_absolute_paths
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights.place import problem

# These settings may change between attempts of a run. A change of another setting would make it a different run.
RESUMABLE_CHANGES = (
    "run.dir", "train.steps", "tracking", "profile", "checkpoint", "eval.every", "engine", "parallel", "slurm",
    "weight_sync", "run.stall_timeout_s", "train.micro_batch_tokens", "train.share_prefixes", "optimizer.lr",
    "optimizer.min_lr", "optimizer.offload", "model.recompute", "model.logits", "model.batch_invariant_head",
    "rollout.max_concurrent_groups", "rollout.max_prompts_per_group", "reward.timeout_s", "reward.workers",
    "distillation.*_timeout_s", "distillation.teachers.*.urls", "distillation.teachers.*.secret_file",
    "environment.timeout_s", "environment.trajectory_timeout_s", "environment.workers", "environment.host",
)  # fmt: skip


def check_run_dir(config: Config, source: str, *, resume: bool) -> None:
    """Raise `ConfigError` for a new run in an old run's directory, or a resume that would be another run."""
    if found := problems(config, resume=resume):
        raise ConfigError(source, found)


def unusable_directory(config: Config) -> list[str]:
    """Return why the run directory cannot be created or written."""
    directory = config.run.dir.absolute()
    existing = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if not existing.is_dir():
        return [f"run.dir = {config.run.dir}: {existing} is not a directory; choose another run.dir"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"run.dir = {config.run.dir}: {existing} is not writable; choose another run.dir"]
    return []


def unusable_weights_directory(config: Config) -> list[str]:
    """Return why versions cannot be written to `weight_sync.directory`."""
    directory = config.weight_sync.directory
    found = problem(RunDir(config.run.dir), directory) if config.samples and directory is not None else None
    return [found] if found else []


def problems(config: Config, *, resume: bool) -> list[str]:
    if unusable := unusable_directory(config):
        return unusable
    saved = RunDir(config.run.dir).config
    if not resume:
        return earlier_run(config)
    if not saved.exists():
        return [f"run.dir = {config.run.dir}: no run to resume, {saved} is missing; correct it, or omit --resume"]
    return changed_settings(config, read_config(saved))  # rules between settings may be newer


def changed_settings(config: Config, saved: Config) -> list[str]:
    """Return settings that differ from the saved ones and would make the resumed run another run."""
    before, now = (_flat(with_absolute_paths(c).model_dump(mode="json")) for c in (saved, config))
    return [
        f"{key} = {now.get(key)!r}: the run was started with {before.get(key)!r}; use that or another run.dir"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key) and not _resumable(key)
    ]


def earlier_run(config: Config) -> list[str]:
    """Return a problem if the run directory already has a run."""
    run = RunDir(config.run.dir)
    if not run.bank.exists() and not run.checkpoints.exists():
        return []
    return [f"run.dir = {run.root}: already contains a run; pass --resume to continue it, or choose another run.dir"]


def _resumable(key: str) -> bool:
    return any(fnmatchcase(key, allowed) or key.startswith(allowed + ".") for allowed in RESUMABLE_CHANGES)


def _flat(tree: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
