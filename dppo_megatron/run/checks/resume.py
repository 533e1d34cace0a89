"""Checks the run directory. A resumed run must be the same run, and a new run needs a new directory.

RUN/files.json has digests of the files that settings name, so that a resumed run reads the same data and models.
Digests depend on content and on names below the setting's path, so run and files may be moved. Reward, environment and
objective modules have no digest: a run may be resumed with a corrected reward, and a module's file does not show
changes in the modules that it imports.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from dppo_megatron.bank.files import segment_paths
from dppo_megatron.common.files import read_as, write_json
from dppo_megatron.config import Config, ConfigError, read_config, save_resolved, with_absolute_paths
from dppo_megatron.data.files import PromptFileError, data_files
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights.place import problem

# Files above 256 MiB are sampled: size, first piece (a header), and the beginnings of 255 other pieces.
PIECE, PIECES, SAMPLE = 1 << 20, 256, 1 << 14
_OF_MODELS = (".json", ".jinja", ".txt", ".model", ".bpe", ".tiktoken", ".safetensors", ".distcp", ".metadata", ".pt")
Digests = dict[str, dict[str, str]]  # in RUN/files.json: setting -> file -> digest
# These settings may change between attempts of a run. Changing another setting would make it a different run.
RESUMABLE_CHANGES = (
    "run.dir", "train.steps", "tracking", "profile", "checkpoint", "eval.every", "engine", "parallel", "slurm",
    "weight_sync", "run.stall_timeout_s", "train.micro_batch_tokens", "train.share_prefixes", "optimizer.lr",
    "optimizer.min_lr", "optimizer.decay_steps", "optimizer.offload", "model.recompute", "model.logits",
    "model.batch_invariant_head",
    "rollout.max_concurrent_groups", "rollout.max_prompts_per_group", "reward.timeout_s", "reward.workers",
    "distillation.*_timeout_s", "distillation.teachers.*.urls", "distillation.teachers.*.secret_file",
    "environment.timeout_s", "environment.trajectory_timeout_s", "environment.workers", "environment.host",
)  # fmt: skip


def check_run_dir(config: Config, source: str, *, resume: bool) -> None:
    """Raise `ConfigError` for a new run in an old run's directory, or a resume that would change the run."""
    if violations := problems(config, resume=resume):
        raise ConfigError(source, violations)


def unusable_directory(config: Config) -> list[str]:
    """Return why the run directory cannot be created or written."""
    directory = config.run.dir.absolute()
    existing = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if not existing.is_dir():
        return [f"run.dir = {config.run.dir}: {existing} is not a directory; choose another run.dir"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"run.dir = {config.run.dir}: {existing} is not writable; choose another run.dir"]
    if config.model.path.absolute() in (directory, RunDir(directory).final_model):
        return [f"run.dir = {config.run.dir}: the run would write into model.path; choose another run.dir"]
    return []


def unusable_weights_directory(config: Config) -> list[str]:
    """Return why versions cannot be written to `weight_sync.directory`."""
    directory = config.weight_sync.directory
    reason = problem(RunDir(config.run.dir), directory) if config.samples and directory is not None else None
    return [reason] if reason else []


def problems(config: Config, *, resume: bool) -> list[str]:
    if unusable := unusable_directory(config):
        return unusable
    saved = RunDir(config.run.dir).config
    if not resume:
        return earlier_run(config)
    if not saved.exists():
        reason = (
            f"no run to resume, {saved} is missing; correct it, name the config.yaml in the directory of a moved run"
        )
        return [f"run.dir = {config.run.dir}: {reason}, or omit --resume for a new run"]
    earlier = read_config(saved)  # rules between settings may be newer
    return [*changed_settings(config, earlier), *_moved_decay(config, earlier)]


def _moved_decay(config: Config, saved: Config) -> Iterator[str]:
    """Yield a problem if a different number of steps would silently change the learning rate."""
    steps, o = config.train.steps, config.optimizer
    end = saved.optimizer.decay_steps or saved.train.steps
    if o.decay != "constant" and o.decay_steps is None and steps != end:
        yield (
            f"train.steps = {steps}: optimizer.decay = {o.decay} ended with step {end}, and the learning rate would "
            f"jump; set optimizer.decay_steps = {end} to keep the decay, or {steps} to stretch it"
        )


def record(config: Config) -> None:
    """Write the run's resolved config, and digests of the files that it names, for `changed_settings`."""
    config, run = with_absolute_paths(config), RunDir(config.run.dir)
    save_resolved(config, run.config)
    digests = read_as(Digests, run.files) or {}  # digests of files that this machine does not have are kept
    for key, path in flat(config.model_dump()):
        if isinstance(path, Path) and not _resumable(key) and (files := contents(key, path)):
            digests[key] = files
    write_json(run.files, digests, indent=1)


def changed_settings(config: Config, saved: Config) -> list[str]:
    """Return settings that differ from saved settings and would make the resumed run a different run.

    A path may differ if the files there are the files that `record` read.
    """
    old, new = (dict(flat(with_absolute_paths(c).model_dump(mode="json"))) for c in (saved, config))
    recorded, out = read_as(Digests, RunDir(config.run.dir).files) or {}, []
    for key in sorted(key for key in {*old, *new} if not _resumable(key)):
        value, files = new.get(key), recorded.get(key)
        if value and files and (digests := contents(key, Path(value))):
            if changed := sorted({name for name, _ in files.items() ^ digests.items()}):
                name = "the file" if changed[0] == "." else changed[0]
                out.append(f"{key} = {value}: {name} is not as at the start; restore it, or use another run.dir")
        elif old.get(key) != value:
            out.append(f"{key} = {value!r}: the run was started with {old.get(key)!r}; use that or another run.dir")
    return out


def earlier_run(config: Config) -> list[str]:
    """Return a problem if the run directory already has a run."""
    run = RunDir(config.run.dir)
    if not run.bank.exists() and not run.checkpoints.exists():
        return []
    return [f"run.dir = {run.root}: already contains a run; pass --resume to continue it, or choose another run.dir"]


def _resumable(key: str) -> bool:
    return any(fnmatchcase(key, allowed) or key.startswith(allowed + ".") for allowed in RESUMABLE_CHANGES)


def flat(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each setting in a tree. Sections in a list have numbers: data.more.0.path."""
    if isinstance(tree, (list, tuple)) and any(isinstance(part, dict) for part in tree):
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        yield key, tree
        return
    for name, below in tree.items():
        yield from flat(below, f"{key}.{name}" if key else name)


def contents(setting: str, path: Path) -> dict[str, str]:
    """Return the digest of each file that a setting names, by path relative to the setting's path; empty without files.

    A bank may still grow, so only the first group's index line is read, which has the group's checksums.
    """
    try:
        if setting == "rollout.bank":
            with (index := segment_paths(path, 0)[1]).open("rb") as lines:
                return {index.name: hashlib.blake2b(line).hexdigest()} if (line := lines.readline()) else {}
        is_data = setting.startswith(("data.", "eval."))
        files = data_files(path) if is_data else [*path.iterdir(), *path.glob("additional_chat_templates/*")]
        regular_files = [f for f in files if f.is_file() and (is_data or (f.suffix or f.name) in _OF_MODELS)]
        base = path if path.exists() else files[0].parent
        return {os.path.relpath(f, base): _digest(f, f.stat().st_size, f.stat().st_mtime_ns) for f in regular_files}
    except (OSError, PromptFileError):  # reported by the checks of data and model
        return {}


@cache
def _digest(file: Path, size: int, _changed_ns: int) -> str:
    digest, step = hashlib.blake2b(b"%d" % size), max(PIECE, size // PIECES)
    with file.open("rb") as opened:
        for place in range(0, size, step):
            opened.seek(place)
            digest.update(opened.read(PIECE if step == PIECE or not place else SAMPLE))
    return digest.hexdigest()
