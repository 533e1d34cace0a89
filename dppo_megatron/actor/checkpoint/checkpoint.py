"""Exact checkpoints: torch_dist shards of weights and optimizer, the schedule, the generators, the caller's state.

    checkpoints/step-000012/    weights and optimizer as shards, rng/, run.json (written last)
    checkpoints/latest          name of the newest whole one, written after it

A checkpoint is written as step-000012.tmp and renamed when every rank has finished, so whatever bears its
final name is whole. With `checkpoint.asynchronous` that happens while training goes on. Weights and optimizer
load at another tensor, pipeline, expert or data-parallel size; the generators only at the same one, and are
seeded afresh otherwise.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from dppo_megatron.actor import megatron_version
from dppo_megatron.actor.layout import Layout, seed_everything
from dppo_megatron.common.files import read_json, replace_directory, sync, write_atomic, write_json

from . import optimizer_shards
from .writer import BackgroundWrite, CheckpointError, HostFiles

if TYPE_CHECKING:
    from dppo_megatron.actor.actor import Actor

log = logging.getLogger(__name__)

_FORMAT = 1
_REMEDY = "remove the newest checkpoint to resume from the one before it"
_RUN, _RNG, _LATEST, _PREFIX, _TMP = "run.json", "rng", "latest", "step-", ".tmp"


def save(actor: Actor, directory: Path, step: int, state: dict[str, Any], keep: int) -> BackgroundWrite | None:
    """Write `directory/step-NNNNNN`, point `latest` to it, then remove all but the newest `keep`.

    Collective over all ranks, on storage they share. With `checkpoint.asynchronous` it returns when all of it is
    copied to the host; see `finish`. Raises CheckpointError on every rank when any rank failed; the checkpoints
    that were there before stay usable then.
    """
    final = directory / f"{_PREFIX}{step:06d}"
    partial = final.with_name(final.name + _TMP)
    layout, settings = actor.layout, actor.config.checkpoint
    files = HostFiles() if settings.asynchronous else None
    run = {
        "format": _FORMAT,
        "step": step,
        "state": state,
        "updates": actor.schedule.num_steps,
        "skipped_in_a_row": actor.skipped_in_a_row,
        "layout": _sizes(layout),
        "run": _identity(actor) | _rates(actor),
    }

    def prepare() -> None:
        if layout.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def write() -> None:
        megatron_version.save_sharded(_sharded_state(actor, loading=False), partial, files)
        if layout.data_parallel_rank == 0 and layout.context_rank == 0:
            (partial / _RNG).mkdir(exist_ok=True)
            torch.save(_rng_state(), partial / _RNG / _rng_name(layout))
            sync(partial / _RNG / _rng_name(layout))

    def complete() -> None:
        if layout.rank == 0:
            for path in [*partial.glob("*.pt"), *partial.glob("*.json"), partial / _RNG]:  # Megatron's common.pt
                sync(path)
            write_json(partial / _RUN, run, indent=1)
            replace_directory(partial, final)
            write_atomic(directory / _LATEST, final.name)
            _prune(directory, final, keep)

    for act in (prepare, write) if files else (prepare, write, complete):
        _together(act, f"checkpoint {final}")
    if files is None:
        return None
    return BackgroundWrite(files, partial, layout.rank, layout.world_size, complete, settings.timeout_s)


def finish(write: BackgroundWrite) -> None:
    """Wait until the checkpoint is complete on every rank. Collective; raises CheckpointError on every rank."""
    _together(write.wait, "the last checkpoint")


def load(actor: Actor, directory: Path) -> dict[str, Any] | None:
    """Restore the newest whole checkpoint into `actor` and return the caller's state; None where there is none.

    Collective over all ranks. Raises CheckpointError listing every difference between the run that saved it
    and this one that would make the continuation another run.
    """
    newest = _on_rank_zero(lambda: _newest(directory), actor.layout, f"checkpoints in {directory}")
    if newest is None:
        return None
    path, run = newest
    _refuse_other_run(path, run, actor)
    _materialise_state(actor.optimizer)
    try:
        loaded = megatron_version.load_sharded(_sharded_state(actor, loading=True), path)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}; {_REMEDY}") from error
    for index, chunk in enumerate(actor.model_chunks):
        chunk.load_state_dict(loaded[_model_key(index)])
    _load_optimizer(actor.optimizer, loaded["optimizer"])
    _set_rates(actor, path, run["run"])
    actor.schedule.num_steps = run["updates"]
    actor.schedule.step(0)
    actor.skipped_in_a_row = run["skipped_in_a_row"]
    rng = path / _RNG / _rng_name(actor.layout)
    if run["layout"] == _sizes(actor.layout) and rng.exists():
        _set_rng_state(torch.load(rng, weights_only=False))
    else:
        log.warning("%s was saved in another layout: random generators are seeded afresh", path)
        seed_everything(actor.config.run.seed + run["step"])
    return run["state"]


def _sharded_state(actor: Actor, *, loading: bool) -> dict[str, Any]:
    """Sharded tensors of weights and optimizer, describing this rank's part of each."""
    metadata = {
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model = {
        _model_key(index): chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(actor.model_chunks)
    }
    weights = model if len(model) > 1 else model[_model_key(0)]
    _materialise_state(actor.optimizer)
    described = [
        optimizer_shards.sharded_state_dict(part, weights, loading=loading)
        if isinstance(part, DistributedOptimizer)
        else part.sharded_state_dict(weights, is_loading=loading, metadata=metadata)
        for part in _parts(actor.optimizer)
    ]
    return {**model, "optimizer": dict(enumerate(described)) if len(described) > 1 else described[0]}


def _model_key(index: int) -> str:
    return f"model{index}"


def _materialise_state(optimizer: MegatronOptimizer) -> None:
    """Adam state at step 0, as the first update would create it: Megatron can describe only state that exists."""
    for part in _parts(optimizer):
        inner = part.optimizer
        if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            part.init_state_fn(inner, part.config)  # the fused ones: Megatron knows their state
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter].update(
                        step=torch.zeros((), dtype=torch.float32),
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros_like(parameter),
                    )


def _load_optimizer(optimizer: MegatronOptimizer, loaded: dict[Any, Any]) -> None:
    parts = _parts(optimizer)
    for part, state in zip(parts, _states_of_parts(parts, loaded), strict=True):
        # Megatron copies every entry of the inner state, but a torch optimizer's `step` is not among the
        # tensors it saved: that one comes with the groups, before the rest.
        tensors = state.pop("param_state", {})
        part.load_state_dict(state)
        inner = part.optimizer
        steps = {p: inner.state[p].pop("step") for p in inner.state if "step" in inner.state[p]}
        if isinstance(part, DistributedOptimizer):
            optimizer_shards.load_states(part, tensors)
        for parameter, step in steps.items():
            # One shared tensor would be advanced once per parameter.
            inner.state[parameter]["step"] = torch.as_tensor(step, dtype=torch.float32).clone()
        if isinstance(part, DistributedOptimizer):
            continue
        _materialise_missing_steps(inner)


def _states_of_parts(parts: list[MegatronOptimizer], loaded: dict[Any, Any]) -> list[dict[str, Any]]:
    """State of each of this rank's optimizers.

    Sharded tensors come as this rank asked for them, everything else as global rank 0 had it when it saved: for one
    optimizer, or for one of the dense and one of the expert parameters by number. A rank has the second where it
    holds experts of an expert-parallel group, so saver and loader may differ in that.
    """
    numbered = len(parts) > 1
    if not all(isinstance(part, DistributedOptimizer) for part in parts):
        if numbered != (0 in loaded):
            raise CheckpointError(
                "parallel.distributed_optimizer = false: such a state loads only where as many ranks hold experts as "
                "when it was saved; use the expert and pipeline sizes it was saved with"
            )
        return [loaded[index] for index in range(len(parts))] if numbered else [loaded]
    saved = [loaded] if "optimizer" in loaded else [loaded[i] for i in (0, 1) if "optimizer" in loaded.get(i, {})]
    wanted = [loaded[index] for index in range(len(parts))] if numbered else [loaded]
    if len(saved) == len(parts):
        return wanted
    groups = {_group_key(group): group for state in saved for group in state["optimizer"]["param_groups"]}
    states = []
    for part, tensors in zip(parts, wanted, strict=True):
        # Dense and expert parameters have the same settings and the same number of steps.
        own = [
            {**groups[_group_key(g)], "is_expert_parallel": g["is_expert_parallel"]}
            for g in part.optimizer.param_groups
        ]
        common = {name: value for name, value in saved[0].items() if name not in (0, 1, "param_state")}
        common["optimizer"] = {**common["optimizer"], "param_groups": own}
        states.append({**common, "param_state": tensors.get("param_state", {})})
    return states


def _group_key(group: dict[str, Any]) -> tuple[Any, ...]:
    """What tells groups apart that an update treats differently."""
    return tuple(group.get(name, group.get(f"pre_{name}")) for name in ("wd_mult", "lr_mult", "is_decoupled_lr"))


def _materialise_missing_steps(inner: torch.optim.Optimizer) -> None:
    """The plain optimizers leave out a step of 0."""
    if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        for state in inner.state.values():
            state.setdefault("step", torch.zeros((), dtype=torch.float32))


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers of dense and of expert parameters that hold any.

    A stage without experts has an empty one where other stages have them, which Megatron cannot describe.
    """
    return [part for part in optimizer.chained_optimizers if _holds_parameters(part)]


def _holds_parameters(part: MegatronOptimizer) -> bool:
    if part.optimizer is None:
        return False
    if isinstance(part, DistributedOptimizer):
        return bool(part.buffers)  # not of this rank's share alone: all that share a buffer must agree
    return any(group["params"] for group in part.optimizer.param_groups)


# Saved with the optimizer's state, so another value in the config would be ignored without a word.
_OPTIMIZER_FIELDS = (
    "warmup_updates", "decay", "weight_decay", "beta1", "beta2", "eps",
)  # fmt: skip


def _identity(actor: Actor) -> dict[str, Any]:
    """What must be the same for the continuation to be the same run, by the name a user knows it under."""
    config = actor.config
    return {
        **{f"model.path config.json {name}": value for name, value in actor.hf.identity().items()},
        **{f"optimizer.{name}": getattr(config.optimizer, name) for name in _OPTIMIZER_FIELDS},
        "model.dtype": config.model.dtype,
        "parallel.distributed_optimizer": config.parallel.distributed_optimizer,
    }


def _rates(actor: Actor) -> dict[str, float]:
    """What a continued run may change, to go on from where another rate diverged."""
    return {f"optimizer.{name}": getattr(actor.config.optimizer, name) for name in ("lr", "min_lr")}


def _set_rates(actor: Actor, path: Path, saved: dict[str, Any]) -> None:
    """Those of the config, not those that came with the optimizer's groups."""
    for name, now in _rates(actor).items():
        if saved.get(name) != now:
            log.warning("%s = %s from here on: %s was saved with %s", name, now, path, saved.get(name))
    for group in actor.optimizer.param_groups:
        group["max_lr"], group["min_lr"] = _rates(actor).values()


def _refuse_other_run(path: Path, run: dict[str, Any], actor: Actor) -> None:
    if run.get("format") != _FORMAT:
        raise CheckpointError(f"{path}: format {run.get('format')}, this version reads {_FORMAT}")
    saved, now = run["run"], _identity(actor)
    # Checkpoints of earlier versions recorded less of the model.
    differing = [f"{name} = {now[name]!r}: the checkpoint was saved with {saved[name]!r}" for name in now
                 if name in saved and saved[name] != now[name]]  # fmt: skip
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


def _rng_state() -> dict[str, Any]:
    """Data-parallel replicas share theirs. Those of the experts differ, and draw nothing after initialisation."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def _newest(directory: Path) -> tuple[Path, dict[str, Any]] | None:
    """The one `latest` names, else (a crash before it was written) the one with the highest step."""
    named = directory / _LATEST
    candidates = sorted(_whole(directory), reverse=True)
    if named.exists() and (directory / named.read_text().strip()) in candidates:
        candidates = [directory / named.read_text().strip()]
    if not candidates:
        return None
    return candidates[0], read_json(candidates[0] / _RUN)


def _whole(directory: Path) -> list[Path]:
    return [p for p in directory.glob(f"{_PREFIX}*") if p.suffix != _TMP and (p / _RUN).exists()]


def _prune(directory: Path, newest: Path, keep: int) -> None:
    """Older ones beyond `keep`, and what crashes left half written. Failing to remove must not stop a run."""
    older = [p for p in sorted(_whole(directory), reverse=True) if p != newest]
    for path in [*older[keep - 1 :], *directory.glob(f"{_PREFIX}*{_TMP}"), *directory.glob(f".{_PREFIX}*")]:
        shutil.rmtree(path, ignore_errors=True)


def _on_rank_zero(find: Callable[[], Any], layout: Layout, what: str) -> Any:
    """What `find` returns on rank 0, on every rank; its error too."""
    box: list[Any] = [None, None]
    if layout.rank == 0:
        try:
            box[0] = find()
        except (OSError, ValueError) as error:
            box[1] = f"{what} cannot be read: {type(error).__name__}: {error}; {_REMEDY}"
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise CheckpointError(box[1])
    return box[0]


def _together(act: Callable[[], None], what: str) -> None:
    """Run `act` on every rank; when any fails, raise on all, naming the ranks."""
    problem = cause = None
    try:
        act()
    except Exception as error:
        problem, cause = f"{type(error).__name__}: {error}", error
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if any(problems):
        lines = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
        raise CheckpointError(f"{what} could not be written:\n  - " + "\n  - ".join(lines)) from cause
