"""Checkpoints: write, refuse, resume, load from another layout."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.actor.scenarios.parts import everywhere, fingerprint, resumed, same, topk, train
from tests.support.actor_cases import actor_config, pack, sequences
from tests.support.actor_ranks import Rank
from tests.support.crafted import RunsCode


def refused(rank: Rank, directory: Path, model: str = "qwen3", changes: dict[str, Any] | None = None) -> str | None:
    """Why a run of these settings does not load the checkpoint; None when it does."""
    from dppo_megatron.actor import CheckpointError

    try:
        with rank.actor(model, **(changes or {})) as actor:
            actor.load_checkpoint(directory)
    except CheckpointError as error:
        return str(error)
    return None


def checkpoint_files(rank: Rank) -> Any:
    """Retention, the pointer, leftovers of a crash, and a checkpoint of another run."""
    directory = rank.directory / "checkpoints"
    with rank.actor() as actor:
        missing = actor.load_checkpoint(directory)
        for step in range(1, 5):
            started = time.perf_counter()
            actor.save_checkpoint(directory, step, {"step": step}, keep=2)
            seconds = time.perf_counter() - started
        kept = sorted(p.name for p in directory.iterdir())
        crashed = directory / "step-000005.tmp"
        crashed.mkdir()
        ignored = actor.load_checkpoint(directory)
        (directory / "latest").unlink()
        without_pointer = actor.load_checkpoint(directory)
        actor.save_checkpoint(directory, 4, {"step": 4, "again": True}, keep=2)
        again = actor.load_checkpoint(directory)
    with rank.actor(optimizer={"lr": 1e-3}) as actor:
        actor.load_checkpoint(directory)
        lowered = (actor.lr, actor.train_update([pack(sequences(3))], topk()).lr, actor.lr)
    damaged = rank.directory / "damaged"
    (damaged / "step-000001").mkdir(parents=True)
    (damaged / "step-000001" / "run.json").write_text("{")
    unreadable = refused(rank, damaged)
    (damaged / "step-000001" / "run.json").write_text('{"format": 1, "step": 1, "state": [], "updates": 1}')
    damaged_record = refused(rank, damaged)
    error = refused(rank, directory, "wider", {"optimizer": {"beta1": 0.5}, "settings": {"dtype": "bf16"}})
    left = sorted(p.name for p in directory.iterdir())
    crafted = {}
    for name in (".metadata", "common.pt", "rng/pipeline-0-tensor-0.pt"):
        file = directory / "step-000004" / name
        good = file.read_bytes() if file.exists() else None  # Megatron-core 0.19 has no common.pt, but reads one
        if name == ".metadata":
            file.write_bytes(pickle.dumps(RunsCode(rank.directory / "ran")))
        else:
            torch.save(RunsCode(rank.directory / "ran"), file)
        crafted[name] = refused(rank, directory)
        file.unlink()
        if good is not None:
            file.write_bytes(good)
    crafted["ran"] = (rank.directory / "ran").exists()
    for file in (directory / "step-000004").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:1000])
    truncated = refused(rank, directory)
    return {
        "missing": missing,
        "kept": kept,
        "ignored": ignored,
        "without_pointer": without_pointer,
        "again": again,
        "left": left,
        "error": error,
        "unreadable": unreadable,
        "damaged_record": damaged_record,
        "seconds": seconds,
        "lowered": lowered,
        "truncated": truncated,
        "crafted": crafted,
    }


def unwritable(rank: Rank) -> Any:
    """A checkpoint that cannot be written names the rank and the reason, and leaves the last good one."""
    from dppo_megatron.actor import CheckpointError

    blocked = rank.directory / "file"
    blocked.write_text("not a directory")
    with rank.actor() as actor:
        try:
            actor.save_checkpoint(blocked, 1, {}, keep=1)
        except CheckpointError as error:
            return str(error)


def from_one_rank(rank: Rank) -> Any:
    """Continue in several layouts from the checkpoint that one rank saved after three updates."""
    results = []
    for layout in ({"tensor": 2}, {}, {"pipeline": 2}):
        with rank.actor(**layout) as actor:
            state = actor.load_checkpoint(rank.models.parent / "from_one_rank")
            results.append({"state": state, **train(actor, sequences(seed=1), updates=2)})
    return results


def resume(rank: Rank) -> Any:
    """Save and continue, load and continue, in each layout: see `resumed`."""
    layouts: dict[str, dict] = {"data": {}, "data_plain": {"distributed_optimizer": False}}
    if rank.world_size == 1:
        layouts["bf16"] = {"settings": {"dtype": "bf16"}}
    else:
        layouts |= {"tensor": {"tensor": 2}, "sequence": {"tensor": 2, "sequence": True}}
        layouts |= {
            "virtual": {"pipeline": 2, "virtual_pipeline": 2},
            "pipeline": {"pipeline": 2},
            "context": {"context": 2},
            "experts": {"model": "qwen3_moe", "expert": 2},
            "whole_experts": {"model": "qwen3_moe", "tensor": 2, "sequence": True, "expert_tensor": 1},
            "latent": {"model": "deepseek", "tensor": 2, "sequence": True},
            "partial_rotary": {"model": "glm4_moe", "tensor": 2, "sequence": True},
            "delta_net": {"model": "qwen3_5", "tensor": 2, "sequence": True},
            "sinks": {"model": "gpt_oss", "tensor": 2, "sequence": True, "expert_tensor": 1},
            "delta_net_stages": {"model": "qwen3_5", "pipeline": 2},
            "bf16": {"tensor": 2, "settings": {"dtype": "bf16"}},
        }
    optimizer = {"decay": "linear", "warmup_updates": 3, "weight_decay": 0.1}
    return {name: resumed(rank, name, {"optimizer": optimizer, **layout}) for name, layout in layouts.items()}


@contextmanager
def said() -> Iterator[dict[str, int]]:
    """Count the objects and the bytes that this rank sends to the others inside the block."""
    from torch.distributed import distributed_c10d

    from dppo_megatron.common.ranks import Ranks

    counts = {"objects": 0, "bytes": 0}
    as_tensor, set_value = distributed_c10d._object_to_tensor, Ranks._set

    def counted_object(*arguments: Any) -> Any:
        counts["objects"] += 1
        return as_tensor(*arguments)

    def counted_value(ranks: Any, key: str, value: Any) -> None:
        counts["bytes"] += len(pickle.dumps(value))
        set_value(ranks, key, value)

    distributed_c10d._object_to_tensor, Ranks._set = counted_object, counted_value
    try:
        yield counts
    finally:
        distributed_c10d._object_to_tensor, Ranks._set = as_tensor, set_value


def saved_again(rank: Rank) -> Any:
    """What ranks tell each other in the first save and in those after it, where they know less or other of the last,
    and what each of these wrote: whether it lists the same contents, and whether it loads to the same bits."""
    from dppo_megatron.hf.torch_dist_metadata import read_metadata

    counts, listed, equal = [], [], []
    with rank.actor("qwen3_moe") as actor:  # data-parallel ranks share what they save
        for step in range(5):
            train(actor, sequences(), updates=1)
            known = actor.sharded_save
            if step == 2 and rank.rank == 0:
                known._described = b"other shards"
            if step == 3 and rank.rank == rank.world_size - 1:
                known._writer._known.results = []
            with said() as count:
                actor.save_checkpoint(rank.directory / f"{step}", step, {"step": step}, keep=1)
            counts.append(count)
            metadata = read_metadata(rank.directory / f"{step}" / f"step-{step:06d}")
            listed.append((metadata.state_dict_metadata, metadata.storage_data))
            bits = fingerprint(actor)
            train(actor, sequences(), updates=1)
            actor.load_checkpoint(rank.directory / f"{step}")
            equal.append(everywhere(same(bits, fingerprint(actor))))
    return {"counts": counts, "listed": [one == listed[0] for one in listed], "equal": equal}


def late_rank(rank: Rank) -> Any:
    """A rank that does not come makes the others raise, not wait for ever.

    The process group is broken afterwards, so this runs on ranks of its own.
    """
    from dppo_megatron.actor import Actor, init_layout

    rank.rendezvous()
    config = actor_config(rank.models / "qwen3", parallel={"world_size": 2, "tensor": 2, "timeout_s": 3})
    layout = init_layout(config)
    actor = Actor(config, layout)
    torch.distributed.barrier()
    raised, started = rank.directory / "raised", time.perf_counter()
    if rank.rank == 1:
        while not raised.exists() and time.perf_counter() - started < 60:
            time.sleep(0.05)
        return None
    try:
        actor.logprobs([pack(sequences())])
    except RuntimeError as error:
        return {"seconds": time.perf_counter() - started, "error": str(error)}
    finally:
        raised.touch()
