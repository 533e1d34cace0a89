"""Saves and loads exact checkpoints: torch_dist shards of weights and optimizer, schedule, generators, caller's state.

With `checkpoint.asynchronous` a checkpoint is written while training continues. Weights and optimizer load at other
tensor, pipeline, expert or data-parallel sizes. Generators load only at unchanged sizes; otherwise they are seeded
again. With `model.lora` a checkpoint has only the adapters; the other weights come from `model.start`. `directory`
lists the files.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from dppo_megatron.common.files import sync
from dppo_megatron.common.ranks import Ranks
from dppo_megatron.config import Config
from dppo_megatron.errors import shown
from dppo_megatron.hf import HFModelConfig, load_into
from dppo_megatron.train.actor.layout import Layout, seed_everything
from dppo_megatron.train.actor.lora import frozen_sum, sharded_adapters
from dppo_megatron.train.actor.model import PolicyModel

from .directory import REMEDY, RNG, CheckpointError, complete, final_path, newest, partial_path
from .only_data import check_extra_states, check_files, checked_metadata, data_only, load_data, reason
from .optimizer_state import host_copies, load_optimizer_state, materialise_state, sharded_optimizer_state
from .sharded import ShardedSave, load_sharded
from .writer import BackgroundWrite, DiskFiles, HostFiles

log = logging.getLogger(__name__)

_FORMAT = 1
_RECORDED = {"step": int, "state": dict, "updates": int, "skipped_in_a_row": int, "layout": dict, "run": dict}
_FROZEN = "frozen"  # checksum of the frozen weights that the adapters belong to


class Checkpointed(Protocol):
    """Lists the actor attributes that a checkpoint reads."""

    config: Config
    layout: Layout
    hf: HFModelConfig
    model_chunks: list[PolicyModel]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    skipped_in_a_row: int
    lr_scale: float
    sharded_save: ShardedSave


def save(actor: Checkpointed, directory: Path, step: int, state: dict[str, Any], keep: int) -> BackgroundWrite | None:
    """Write `directory/step-NNNNNN`, point `latest` to it, then remove all but the newest `keep`.

    All ranks must call this function, and must share the storage. With `checkpoint.asynchronous` it returns when
    everything is copied to the host; see `finish`. If any rank fails, every rank raises CheckpointError, and earlier
    checkpoints stay usable.
    """
    final = final_path(directory, step)
    partial = partial_path(final)
    layout, settings = actor.layout, actor.config.checkpoint
    ranks = Ranks()
    files = HostFiles() if settings.asynchronous else DiskFiles(ranks.alive)
    run = {
        "format": _FORMAT,
        "step": step,
        "state": state,
        "updates": actor.schedule.num_steps,
        "skipped_in_a_row": actor.skipped_in_a_row,
        "lr_scale": actor.lr_scale,
        "layout": _sizes(layout),
        "run": _identity(actor) | _rates(actor),
    }
    if actor.config.model.lora.r:
        run[_FROZEN] = frozen_sum(actor.model_chunks, actor.hf)

    def prepare() -> None:
        if layout.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def write() -> None:
        shards = _sharded_state(actor, loading=False)
        files.adopt(host_copies(shards["optimizer"]))
        actor.sharded_save.save(shards, partial, files)
        if layout.data_parallel_rank == 0 and layout.context_rank == 0:
            (partial / RNG).mkdir(exist_ok=True)
            torch.save(_generators_state(), partial / RNG / _rng_name(layout))
            sync(partial / RNG / _rng_name(layout))

    def finish_write() -> None:
        if layout.rank == 0:
            for path in [*partial.glob("*.pt"), *partial.glob("*.json"), partial / RNG]:  # *.pt: Megatron's common.pt
                sync(path)
            complete(partial, final, run, keep)

    for act in (prepare, write) if settings.asynchronous else (prepare, write, finish_write):
        _write_on_all(ranks, act, f"checkpoint {final}")
    if isinstance(files, DiskFiles):
        return None
    return BackgroundWrite(files, partial, layout.rank, layout.world_size, finish_write, settings.timeout_s)


def finish(write: BackgroundWrite) -> None:
    """Wait until the checkpoint is complete on every rank. Collective; raises CheckpointError on every rank."""
    ranks = Ranks()
    _write_on_all(ranks, lambda: write.wait(ranks.alive), "the last checkpoint")


def load(actor: Checkpointed, directory: Path) -> dict[str, Any] | None:
    """Restore the newest complete checkpoint into `actor` and return the caller's state; None without a checkpoint.

    All ranks must call this function. Raises CheckpointError listing every setting that differs from the run that saved
    the checkpoint and would change the result.
    """
    checkpoint = Ranks().from_rank_zero(lambda: newest(directory), f"the newest checkpoint in {directory}")
    if checkpoint is None:
        return None
    path, run = checkpoint
    _refuse_damaged(path, run)
    _refuse_other_run(path, run, actor)
    lora = bool(actor.config.model.lora.r)
    if lora:
        start = actor.config.model.start
        load_into(actor.model_chunks, start, actor.hf)
        if run.get(_FROZEN) != frozen_sum(actor.model_chunks, actor.hf):
            raise CheckpointError(f"{path}: {start} has changed since these adapters were trained; restore its weights")
    materialise_state(actor.optimizer)
    digest = Ranks().from_rank_zero(lambda: check_files(path), f"what is in {path}")
    try:
        with data_only(), checked_metadata(digest):
            loaded = load_sharded(_sharded_state(actor, loading=True), path)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}; {REMEDY}") from error
    check_extra_states(loaded, path)
    for index, chunk in enumerate(actor.model_chunks):
        # `pop` frees the tensors that Megatron assembled.
        chunk.load_state_dict(loaded.pop(_model_key(index)), strict=not lora)
    load_optimizer_state(actor.optimizer, loaded["optimizer"])
    _set_rates(actor, path, run["run"])
    actor.schedule.num_steps = run["updates"]
    actor.schedule.step(0)
    actor.skipped_in_a_row = run["skipped_in_a_row"]
    actor.lr_scale = run.get("lr_scale", 1.0)  # checkpoints of earlier versions lack it
    rng = path / RNG / _rng_name(actor.layout)
    if run["layout"] == _sizes(actor.layout) and rng.exists():
        _set_generators(load_data(rng))
    else:
        log.warning("%s was saved in another layout: random generators are seeded again", path)
        seed_everything(actor.config.run.seed + run["step"])
    return run["state"]


def _sharded_state(actor: Checkpointed, *, loading: bool) -> dict[str, Any]:
    """Return sharded tensors that describe this rank's part of the weights and optimizer state."""
    metadata = {
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }

    def weights_of(chunk: PolicyModel) -> dict[str, Any]:
        return sharded_adapters(chunk) if actor.config.model.lora.r else chunk.sharded_state_dict(metadata=metadata)

    model = {_model_key(index): weights_of(chunk) for index, chunk in enumerate(actor.model_chunks)}
    weights = model if len(model) > 1 else model[_model_key(0)]
    return {**model, "optimizer": sharded_optimizer_state(actor.optimizer, weights, metadata, loading=loading)}


def _model_key(index: int) -> str:
    return f"model{index}"


# The optimizer state contains these settings, so a different value in the config would be silently ignored.
_OPTIMIZER_FIELDS = (
    "warmup_updates", "decay", "weight_decay", "beta1", "beta2", "eps",
)  # fmt: skip


def _identity(actor: Checkpointed) -> dict[str, Any]:
    """Return the settings that a continued run must not change, under the names that a user knows."""
    config = actor.config
    return {
        **{f"model.path config.json {name}": value for name, value in actor.hf.identity().items()},
        **{f"optimizer.{name}": getattr(config.optimizer, name) for name in _OPTIMIZER_FIELDS},
        "model.dtype": config.model.dtype,
        **{f"model.lora.{name}": value for name, value in _trained(config).items()},
        "parallel.distributed_optimizer": config.parallel.distributed_optimizer,
    }


def _trained(config: Config) -> dict[str, Any]:
    lora = config.model.lora
    return {"r": lora.r} | ({"alpha": lora.alpha, "targets": sorted(lora.targets)} if lora.r else {})


def _rates(actor: Checkpointed) -> dict[str, float]:
    """Return the settings that a continued run may change, for example after the old rate diverged."""
    return {f"optimizer.{name}": getattr(actor.config.optimizer, name) for name in ("lr", "min_lr")}


def _set_rates(actor: Checkpointed, path: Path, saved: dict[str, Any]) -> None:
    """Use the configured rates instead of the rates saved with the optimizer groups."""
    for name, rate in _rates(actor).items():
        if saved.get(name) != rate:
            log.warning("%s = %s from here on: %s was saved with %s", name, rate, path, saved.get(name))
    for group in actor.optimizer.param_groups:
        group["max_lr"], group["min_lr"] = _rates(actor).values()


def _refuse_damaged(path: Path, run: dict[str, Any]) -> None:
    if run.get("format") != _FORMAT:
        raise CheckpointError(f"{path}: format {shown(run.get('format'))}, this version reads {_FORMAT}")
    for name, kind in _RECORDED.items():
        if type(run.get(name)) is not kind:
            raise CheckpointError(f"{path}: run.json is damaged: {name} is {shown(run.get(name))}; {REMEDY}")


def _refuse_other_run(path: Path, run: dict[str, Any], actor: Checkpointed) -> None:
    saved, settings = run["run"], _identity(actor)
    # Checkpoints of earlier versions lack some of these names; missing names are not compared.
    differing = [f"{name} = {settings[name]!r}: the checkpoint was saved with {saved[name]!r}" for name in settings
                 if name in saved and saved[name] != settings[name]]  # fmt: skip
    if differing:
        raise CheckpointError(f"{path} does not fit this run:\n  - " + "\n  - ".join(differing))


def _sizes(layout: Layout) -> dict[str, int | None]:
    return {
        "tensor": layout.tensor_size,
        "pipeline": layout.pipeline_size,
        "virtual_pipeline": layout.virtual_pipeline_size,
        "context": layout.context_size,
        "expert": layout.expert_size,
        "expert_tensor": layout.expert_tensor_size,
        "data": layout.data_parallel_size,
    }


def _rng_name(layout: Layout) -> str:
    return f"pipeline-{layout.pipeline_rank}-tensor-{layout.tensor_rank}.pt"


def _write_on_all(ranks: Ranks, act: Callable[[], None], checkpoint_name: str) -> None:
    try:
        ranks.on_every_rank(act, checkpoint_name)
    except Exception as error:  # the same on every rank
        raise CheckpointError(f"{checkpoint_name} could not be written:\n  - {error}") from error


def _generators_state() -> dict[str, Any]:
    """Return the state of every random generator on this rank; data-parallel replicas have the same state.

    Expert generators differ between replicas, but draw nothing after initialization.
    """
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _set_generators(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
