"""Checkpoints: exact, atomic, and refused where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dppo_megatron import hf
from dppo_megatron.actor import CheckpointError
from dppo_megatron.actor.checkpoint import save_load
from dppo_megatron.actor.checkpoint.optimizer_state import materialise_state
from dppo_megatron.actor.checkpoint.sharded import _torch_failures_as_errors
from tests.actor.scenarios import checkpoint as scenarios
from tests.support.actor_cases import DEEPSEEK, YARN, actor_config

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


@pytest.mark.parametrize("world", ["one_rank", pytest.param("two_ranks", marks=pytest.mark.slow)])
def test_resume_is_bit_identical(request, world):
    results = request.getfixturevalue(world)(scenarios.resume)
    assert len(results) == (3 if world == "one_rank" else 15)
    for layout, (state, equal_bits, equal_losses) in results.items():
        assert state == {"step": 2}, layout
        assert equal_losses, layout
        assert equal_bits, layout


@pytest.mark.slow
@pytest.mark.parametrize("world", ["one_rank", "two_ranks"])
def test_what_cannot_change_between_saves_is_gathered_once(request, world):
    """Other shards (third save) or other places (fourth save) are gathered again."""
    values = request.getfixturevalue(world)(scenarios.saved_again)
    assert values["listed"] == [True] * 5
    assert values["equal"] == [True] * 5
    objects = [count["objects"] for count in values["counts"]]
    assert objects[1] == objects[4] == 0
    assert objects[0] == objects[2] > 0
    assert 0 < objects[3] < objects[0]
    assert values["counts"][1]["bytes"] < 1000


def test_retention_pointer_and_leftovers(one_rank):
    values = one_rank(scenarios.checkpoint_files)
    assert values["missing"] is None
    assert values["kept"] == ["latest", "step-000003", "step-000004"]
    assert values["ignored"] == {"step": 4}
    assert values["without_pointer"] == {"step": 4}
    assert values["again"] == {"step": 4, "again": True}
    assert values["left"] == values["kept"]


def test_a_checkpoint_of_another_run_is_refused_with_every_difference(one_rank):
    error = one_rank(scenarios.checkpoint_files)["error"]
    assert "optimizer.beta1 = 0.5: the checkpoint was saved with 0.9" in error
    assert "hidden_size = 64: the checkpoint was saved with 32" in error
    assert "model.dtype = 'bf16': the checkpoint was saved with 'fp32'" in error


def test_an_unwritable_checkpoint_names_rank_and_reason(one_rank):
    error = one_rank(scenarios.unwritable)
    assert "could not be written" in error
    assert "rank 0: " in error
    assert "NotADirectoryError" in error


def test_an_unreadable_checkpoint_is_named(one_rank):
    error = one_rank(scenarios.checkpoint_files)["unreadable"]
    assert "damaged cannot be read" in error
    assert "not valid JSON" in error
    assert "remove the newest checkpoint to resume from the one before it" in error
    record = one_rank(scenarios.checkpoint_files)["damaged_record"]
    assert "step-000001: run.json is damaged: state is []; remove the newest checkpoint" in record
    truncated = one_rank(scenarios.checkpoint_files)["truncated"]
    assert "step-000004 cannot be read" in truncated
    assert "remove the newest checkpoint" in truncated


def test_files_that_name_code_are_refused_and_nothing_of_it_runs(one_rank):
    crafted = one_rank(scenarios.checkpoint_files)["crafted"]
    assert not crafted.pop("ran")
    for name, error in crafted.items():
        assert name in error
        assert "posix.system" in error
        assert len(error) < 1000


def test_a_resumed_run_may_have_another_learning_rate(one_rank):
    assert one_rank(scenarios.checkpoint_files)["lowered"] == (1e-3, 1e-3, 1e-3)


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
