"""Checkpoints: exact, atomic, and refused where they do not fit."""

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dppo_megatron import hf
from dppo_megatron.train.actor import CheckpointError
from dppo_megatron.train.actor.checkpoint import save_load
from dppo_megatron.train.actor.checkpoint.optimizer_state import materialise_state
from dppo_megatron.train.actor.checkpoint.sharded import _torch_failures_as_errors
from tests.support.actor_cases import DEEPSEEK, YARN, actor_config, pack, sequences
from tests.support.actor_ranks import Rank, on_ranks, slow
from tests.support.crafted import RunsCode
from tests.train.actor.scenarios.parts import assert_resumed, fingerprint, refused, same, topk, train

pytestmark = pytest.mark.megatron_next


@pytest.mark.parametrize(
    ("failures", "text"),
    [
        ({0: "rank 0: DiskFull: full", 1: "rank 0: DiskFull: full"}, "rank 0: DiskFull: full"),
        ({1: "a"}, "rank 1: OSError: a"),
    ],
)
def test_every_reason_of_a_failed_save_is_given_once_with_its_rank(failures, text):
    raised = {rank: (OSError(reason), None) for rank, reason in failures.items()}
    with pytest.raises(OSError, match=f"^{text}$"), _torch_failures_as_errors():
        raise torch.distributed.checkpoint.CheckpointException("write", raised)


@on_ranks(1, slow(2))
def test_resume_is_bit_identical(rank: Rank):
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
    for name, layout in layouts.items():
        assert_resumed(rank, name, {"optimizer": optimizer, **layout})


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


@pytest.mark.slow
@on_ranks(1, 2)
def test_the_places_of_shards_are_gathered_again_only_after_a_change(rank: Rank):
    """Other shards (third save) or other places (fourth save) are gathered again."""
    from dppo_megatron.hf.torch_dist_metadata import read_metadata

    counts, listed = [], []
    with rank.actor("qwen3_moe") as actor:  # data-parallel ranks share what they save
        for step in range(5):
            train(actor, sequences(), updates=1)
            known = actor.sharded_save
            if step == 2 and rank.rank == 0:
                known._described = b"other shards"
            if step == 3 and rank.rank == rank.world_size - 1:
                known._writer._record.results = []
            with said() as count:
                actor.save_checkpoint(rank.directory / f"{step}", step, {"step": step}, keep=1)
            counts.append(count)
            metadata = read_metadata(rank.directory / f"{step}" / f"step-{step:06d}")
            listed.append((metadata.state_dict_metadata, metadata.storage_data))
            bits = fingerprint(actor)
            train(actor, sequences(), updates=1)
            actor.load_checkpoint(rank.directory / f"{step}")
            assert same(bits, fingerprint(actor)), step
    assert all(one == listed[0] for one in listed)
    if rank.rank == 0:
        objects = [count["objects"] for count in counts]
        assert objects[1] == objects[4] == 0
        assert objects[0] == objects[2] > 0
        assert 0 < objects[3] < objects[0]
        assert counts[1]["bytes"] < 1000


@on_ranks(1)
def test_retention_pointer_and_leftovers(rank: Rank):
    directory = rank.directory / "checkpoints"
    with rank.actor() as actor:
        assert actor.load_checkpoint(directory) is None
        for step in range(1, 5):
            actor.save_checkpoint(directory, step, {"step": step}, keep=2)
        kept = sorted(p.name for p in directory.iterdir())
        assert kept == ["latest", "step-000003", "step-000004"]
        (directory / "step-000005.tmp").mkdir()  # left by a crash
        assert actor.load_checkpoint(directory) == {"step": 4}
        (directory / "latest").unlink()
        assert actor.load_checkpoint(directory) == {"step": 4}
        actor.save_checkpoint(directory, 4, {"step": 4, "again": True}, keep=2)
        assert actor.load_checkpoint(directory) == {"step": 4, "again": True}
        assert sorted(p.name for p in directory.iterdir()) == kept


@on_ranks(1)
def test_a_resumed_run_may_have_another_learning_rate(rank: Rank):
    with rank.actor() as actor:
        actor.save_checkpoint(rank.directory, 1, {}, keep=1)
    with rank.actor(optimizer={"lr": 1e-3}) as actor:
        actor.load_checkpoint(rank.directory)
        assert actor.lr == 1e-3
        assert actor.train_update([pack(sequences(3))], topk()).lr == 1e-3
        assert actor.lr == 1e-3


@on_ranks(1)
def test_a_checkpoint_that_does_not_fit_or_cannot_be_read_is_refused(rank: Rank):
    """Of another run with every difference, damaged, or with files that name code, of which nothing runs."""
    step = rank.directory / "step-000001"
    with rank.actor() as actor:
        actor.save_checkpoint(rank.directory, 1, {}, keep=1)
    error = refused(rank, rank.directory, "wider", {"optimizer": {"beta1": 0.5}, "settings": {"dtype": "bf16"}})
    assert "optimizer.beta1 = 0.5: the checkpoint was saved with 0.9" in error
    assert "hidden_size = 64: the checkpoint was saved with 32" in error
    assert "model.dtype = 'bf16': the checkpoint was saved with 'fp32'" in error
    for name in (".metadata", "common.pt", "rng/pipeline-0-tensor-0.pt"):
        file = step / name
        good = file.read_bytes() if file.exists() else None  # Megatron-core 0.19 has no common.pt, but reads one
        if name == ".metadata":
            file.write_bytes(pickle.dumps(RunsCode(rank.directory / "ran")))
        else:
            torch.save(RunsCode(rank.directory / "ran"), file)
        error = refused(rank, rank.directory)
        assert name in error
        assert "posix.system" in error
        assert len(error) < 1000
        file.unlink()
        if good is not None:
            file.write_bytes(good)
    assert not (rank.directory / "ran").exists()
    for file in step.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:1000])
    truncated = refused(rank, rank.directory)
    assert "step-000001 cannot be read" in truncated
    assert "remove the newest checkpoint" in truncated


@on_ranks(1)
def test_an_unreadable_checkpoint_is_named(rank: Rank):
    record = rank.directory / "damaged/step-000001/run.json"
    record.parent.mkdir(parents=True)
    record.write_text("{")
    error = refused(rank, rank.directory / "damaged")
    assert "damaged cannot be read" in error
    assert "not valid JSON" in error
    assert "remove the newest checkpoint to resume from the one before it" in error
    record.write_text('{"format": 1, "step": 1, "state": [], "updates": 1}')
    error = refused(rank, rank.directory / "damaged")
    assert "step-000001: run.json is damaged: state is []; remove the newest checkpoint" in error


@on_ranks(1)
def test_an_unwritable_checkpoint_names_rank_and_reason(rank: Rank):
    (rank.directory / "file").write_text("not a directory")
    with rank.actor() as actor, pytest.raises(CheckpointError, match=r"(?s)could not be written.*rank 0: .*NotADirect"):
        actor.save_checkpoint(rank.directory / "file", 1, {}, keep=1)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"routed_scaling_factor": 2.5}, ["moe.routed_scaling_factor = 1.5: the checkpoint was saved with 2.5"]),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
            ["rope_type = 'yarn': the checkpoint was saved with 'default'", "rope_scaling = {'factor': 4.0"],
        ),
        ({"qk_nope_head_dim": 4}, ["head_dim = 16", "mla.qk_nope_head_dim = 8: the checkpoint was saved with 4"]),
    ],
)
def test_every_field_of_the_model_is_recorded_and_compared(tmp_path, changes, expected):
    raw = {**DEEPSEEK, "rope_parameters": YARN}
    config = actor_config(tmp_path)
    actor, other = (SimpleNamespace(hf=hf.parse_hf_config(r), config=config) for r in (raw, {**raw, **changes}))
    saved = json.loads(json.dumps(save_load._identity(other)))
    found = checkpoint_problems(actor, saved)
    assert len(found) == len(expected)
    assert all(part in line for part, line in zip(expected, found, strict=True))
    # A checkpoint of an earlier version recorded fewer fields.
    assert not checkpoint_problems(actor, {name: saved[name] for name in list(saved)[:3]})


def checkpoint_problems(actor, saved: dict) -> list[str]:
    try:
        save_load._refuse_other_run(Path("step-000001"), {"format": save_load._FORMAT, "run": saved}, actor)
    except CheckpointError as error:
        return str(error).splitlines()[1:]
    return []


def test_a_fused_optimizer_has_its_state_before_the_first_update():
    """Megatron creates the state of TransformerEngine's and apex's Adam."""
    made = []
    inner = SimpleNamespace(param_groups=[{"params": [torch.nn.Parameter(torch.zeros(1))]}])
    part = SimpleNamespace(optimizer=inner, config="settings", init_state_fn=lambda *given: made.append(given))
    materialise_state(SimpleNamespace(chained_optimizers=[part]))
    assert made == [(inner, "settings")]
