"""kill -9 of a trainer rank in the middle of a step, in several layouts: the resumed run ends with the same bits.

With data parallelism the step is one that is being taken back: `tests.support.objectives.Fragile` kills its rank there.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from dppo_megatron.bank import BankWriter
from dppo_megatron.types import Prompt, Rollout, RolloutGroup
from tests.support.actor_cases import MOE
from tests.support.faults import command_line
from tests.support.runs import descendants, records, run, start, steps_done, wait_until, weights_digest, write_config

STEPS, GROUPS, SAMPLES, LONGEST = 7, 8, 8, 24
SAVED, KILLED_AFTER = 2, 3  # five more steps are trained after the kill
BOUND = 0.043
EXPERTS = {**MOE, "num_experts": 4, "moe_intermediate_size": 64, "mlp_only_layers": []}
LAYOUTS = {
    "virtual_pipeline": ({}, {"pipeline": 2, "virtual_pipeline": 2}),
    "data": ({}, {}),  # with steps that are taken back in part
    # Of a dense model on tensor-parallel ranks it is in tests/faults/test_kill_matrix.py.
    "experts": (EXPERTS, {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}),
}


@pytest.fixture(scope="module")
def bank(tmp_path_factory) -> Path:
    """Random responses with the log-probs a random policy gives: only training itself matters here."""
    generator = np.random.default_rng(0)
    directory = tmp_path_factory.mktemp("bank") / "bank"
    with BankWriter(directory, GROUPS, fsync=False) as writer:
        for position in range(STEPS * GROUPS):
            prompt = Prompt(position, position, np.array([3, 4, 12], np.int32), "12+", "3")
            rollouts = tuple(
                Rollout(
                    token_ids=generator.integers(1, 16, size, dtype=np.int32),
                    rollout_logprob=generator.normal(-2.8, 0.3, size).astype(np.float32),
                    versions=np.zeros(size, np.int32),
                    finish_reason="length" if size == LONGEST else "stop",
                )
                for size in generator.integers(8, LONGEST + 1, SAMPLES)
            )
            rewards = generator.random(SAMPLES, np.float32)
            writer.append(RolloutGroup(prompt, rollouts, rewards, np.zeros(SAMPLES, bool), 1.0))
    return directory


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    from make_task import character_tokenizer, write_sums

    from dppo_megatron.hf.small_model import write_small_model

    directory = tmp_path_factory.mktemp("task")
    write_sums(directory, seed=1)
    for name, changes in {"dense": {}, "experts": EXPERTS}.items():
        write_small_model(directory / name, 1, character_tokenizer(), **{"num_hidden_layers": 4, **changes})
    return directory


def write_layout(layout: str, task: Path, bank: Path, directory: Path, *, asynchronous: bool) -> Path:
    changes, parallel = LAYOUTS[layout]
    tree = {
        "run": {"dir": str(directory / "run"), "stall_timeout_s": 120},
        "model": {"path": str(task / ("experts" if changes else "dense")), "dtype": "fp32"},
        "parallel": {"world_size": 2, "timeout_s": 120, **parallel},
        "objective": {"name": "tests.support.objectives:fragile" if layout == "data" else "dppo_binary_tv"},
        "data": {"train": str(task / "train.jsonl")},
        "rollout": {
            "bank": str(bank),
            "prompts_per_step": GROUPS,
            "group_size": SAMPLES,
            "max_response_tokens": LONGEST,
        },
        # Many small micro-batches: a step is long enough to be killed in.
        "train": {"steps": STEPS, "updates_per_step": 2, "micro_batch_tokens": 48},
        "optimizer": {"lr": 1e-3, "warmup_updates": 3, "decay": "cosine", "weight_decay": 0.1},
        "acceptance": {"bound": BOUND, "share": 1.0} if layout == "data" else {},
        "checkpoint": {"every": SAVED, "asynchronous": asynchronous},
    }
    directory.mkdir(parents=True, exist_ok=True)
    return write_config(tree, directory / "config.yaml")


def kill_in_a_step(config: Path, run_dir: Path, output: Path) -> None:
    process = start("train", config, output=output)
    latest = run_dir / "checkpoints" / "latest"
    wait_until(lambda: latest.exists() and KILLED_AFTER in steps_done(run_dir), f"step {KILLED_AFTER}", process, output)
    trainers = [child for child in descendants(process) if "dppo_megatron trainer" in command_line(child)]
    trainers[-1].kill()
    assert process.wait(60) == 1
    assert "SIGKILL" in output.read_text()
    assert max(steps_done(run_dir)) < STEPS, "the run was over before it was killed"


def kill_in_a_step_that_is_taken_back(config: Path, run_dir: Path, fragile: Path, output: Path) -> None:
    fragile.touch()
    process = start("train", config, output=output)
    wait_until(lambda: not fragile.exists(), "a step that is taken back", process, output)
    assert process.wait(60) == 1
    assert "SIGKILL" in output.read_text()
    assert SAVED <= max(steps_done(run_dir)) < STEPS


@pytest.mark.parallel
@pytest.mark.parametrize(("layout", "asynchronous"), [("virtual_pipeline", True), ("data", True), ("experts", False)])
def test_kill_9_in_a_step_then_resume_is_bit_identical(task, bank, tmp_path, monkeypatch, layout, asynchronous):
    undisturbed = write_layout(layout, task, bank, tmp_path / "undisturbed", asynchronous=asynchronous)
    run("train", undisturbed)
    if layout == "data":
        steps = [r for r in records(tmp_path / "undisturbed" / "run") if "train/loss" in r]
        kept, scales = ([r[f"acceptance/{name}"] for r in steps] for name in ("fraction", "lr_scale"))
        assert any(0 < fraction < 1 for fraction in kept[SAVED:]), kept
        assert len({*scales[SAVED:], 1.0}) > 2, scales  # the checkpoint must have kept them
    killed = write_layout(layout, task, bank, tmp_path / "killed", asynchronous=asynchronous)
    if layout == "data":
        fragile = tmp_path / "killed" / "fragile"
        monkeypatch.setenv("FRAGILE", str(fragile))
        kill_in_a_step_that_is_taken_back(killed, tmp_path / "killed" / "run", fragile, tmp_path / "output")
    else:
        kill_in_a_step(killed, tmp_path / "killed" / "run", tmp_path / "output")
    latest = tmp_path / "killed" / "run" / "checkpoints" / "latest"
    assert latest.read_text() == f"step-{SAVED:06d}", "the killed run got further than was meant"
    run("train", killed, "--resume")
    assert steps_done(tmp_path / "killed" / "run") == list(range(1, STEPS + 1))
    assert weights_digest(tmp_path / "killed" / "run") == weights_digest(tmp_path / "undisturbed" / "run")
    lost = {"time", "throughput/"}
    for one, two in zip(*(records(tmp_path / name / "run") for name in ("undisturbed", "killed")), strict=True):
        same = [{k: v for k, v in r.items() if not k.startswith(tuple(lost))} for r in (one, two)]
        assert json.dumps(same[0], sort_keys=True) == json.dumps(same[1], sort_keys=True)
