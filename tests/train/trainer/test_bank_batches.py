"""The samples of a step that carry loss, with their advantages and weights."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dppo_megatron.bank import BankReader, BankWriter
from dppo_megatron.bank import reader as bank_reader
from dppo_megatron.common.files import append_json_line
from dppo_megatron.common.progress import show_progress
from dppo_megatron.objectives import Objective, ObjectiveSettings, build_objective
from dppo_megatron.run.checks import settings_problems
from dppo_megatron.run_dir import RunDir
from dppo_megatron.train.trainer.batches import BankBatches, parts_of
from dppo_megatron.types import Prompt, Rollout, RolloutGroup
from tests.support.actor_cases import QWEN3_MOE, write_config
from tests.support.bank import make_group
from tests.support.tiny_task import TEMPERATURE, K, task_config, write_config_json

LONGEST, SAMPLES = 6, 4
# (length, truncated, reward) of each sample; the second group is all right, the last sample of the first failed
GROUPS = [
    [(6, True, 0.0), (2, False, 1.0), (6, False, 1.0), (3, False, 1.0)],
    [(5, False, 1.0), (4, False, 1.0), (3, False, 1.0), (6, True, 1.0)],
]
FAILED = np.array([[False, False, False, True], [False] * 4])


def write(directory: Path, *groups: RolloutGroup) -> None:
    with BankWriter(directory / "bank", len(groups)) as bank:
        for group in groups:
            bank.append(group)


def batches(directory: Path, method: str | Objective = "dppo_binary_tv", rank: int = 0, size: int = 1, **sections):
    """The source on the bank in `directory`, under changed settings."""
    base = {"prompts_per_step": 1, "group_size": SAMPLES, "max_response_tokens": LONGEST}
    sections["rollout"] = base | sections.get("rollout", {})
    config = task_config(directory, **{"train": {"updates_per_step": 1}, **sections})
    if not config.model.path.exists():
        write_config_json(directory)
    objective = build_objective(method, **config.objective.settings) if isinstance(method, str) else method
    return BankBatches(config, BankReader(config.rollout.bank), objective, rank, size)


@pytest.fixture
def read(tmp_path):
    """Reads step 0 of the bank of GROUPS under changed settings."""
    write(tmp_path, *(_group(position, group) for position, group in enumerate(GROUPS)))

    def run(*method: str | Objective, rollout=(), **given):
        return batches(tmp_path, *method, rollout={"prompts_per_step": 2, **dict(rollout)}, **given).read(0)

    return run


def _group(position: int, samples: list) -> RolloutGroup:
    prompt = Prompt(position, position, np.array([7, 8], np.int32), "", "")
    rollouts = []
    for i, (length, truncated, _) in enumerate(samples):
        logprobs = np.full(length, -1.0, np.float32)
        ids = np.tile(np.arange(10, 10 + K, dtype=np.int32), (length, 1))
        rollouts.append(
            Rollout(
                token_ids=np.full(length, i, np.int32),
                rollout_logprob=logprobs,
                versions=np.zeros(length, np.int32),
                finish_reason="length" if truncated else "stop",
                topk_ids=ids,
                rollout_topk_logprob=np.full((length, K), -2.0, np.float32),
            )
        )
    rewards = np.array([reward for _, _, reward in samples], np.float32)
    return RolloutGroup(prompt, tuple(rollouts), rewards * ~FAILED[position], FAILED[position], TEMPERATURE)


def learned(batch) -> dict[int, tuple[int, float, float]]:
    """Sample of the first group -> (tokens with loss, advantage, weight); the sampled token is the sample's number."""
    (update,) = batch.updates
    out = {}
    for micro in update.micro_batches:
        for sample in range(SAMPLES):
            rows = micro.mask & (micro.target_ids == sample)
            if rows.any():
                (advantage,), (weight,) = micro.advantage[rows].unique(), micro.loss_weight[rows].unique()
                out[sample] = (int(rows.sum()), float(advantage), float(weight))
    return out


def test_by_default_every_verified_sample_of_a_group_with_signal_carries_loss(read):
    batch = read()
    found = learned(batch)
    assert {sample: tokens for sample, (tokens, _, _) in found.items()} == {0: 6, 1: 2, 2: 6}  # 3 failed
    assert [advantage for _, advantage, _ in found.values()] == pytest.approx([-2 / 3, 1 / 3, 1 / 3])
    # Seven verified samples in all; the second group has no signal but counts.
    assert [weight for _, _, weight in found.values()] == pytest.approx([1 / (7 * LONGEST)] * 3)
    assert batch.metrics["rollout/truncated_share"] == 2 / 8
    assert batch.metrics["rollout/groups_without_signal"] == 1
    assert batch.metrics["rollout/reward_failed"] == 1
    assert "rollout/overlong_filtered" not in batch.metrics
    assert "rollout/overlong_penalty_mean" not in batch.metrics


class OwnEntropyBonus(Objective):
    """A user's objective declares its needs as class attributes."""

    needs_entropy = True


@pytest.mark.parametrize(
    "objective",
    [
        Objective("kl", ObjectiveSettings(control="none", reference_kl="k2", reference_kl_coefficient=0.1)),
        OwnEntropyBonus("own", ObjectiveSettings(control="none")),
    ],
)
def test_samples_without_advantage_are_computed_where_they_have_a_gradient(read, objective):
    assert read(Objective("plain", ObjectiveSettings(control="none"))).updates[0].sequences == 3
    assert read(objective).updates[0].sequences == 7  # the group without signal too


def test_overlong_filter_leaves_cut_responses_out_of_loss_and_denominators(read):
    batch = read(objective={"overlong_filter": True})
    found = learned(batch)
    assert {sample: tokens for sample, (tokens, _, _) in found.items()} == {1: 2, 2: 6}  # 6 long but finished: stays
    assert [advantage for _, advantage, _ in found.values()] == pytest.approx([1 / 3, 1 / 3])  # the baseline has all
    assert [weight for _, _, weight in found.values()] == pytest.approx([1 / (5 * LONGEST)] * 2)
    assert batch.metrics["rollout/overlong_filtered"] == 2
    assert batch.metrics["rollout/truncated_share"] == 2 / 8
    assert batch.updates[0].sequences == 2


def test_overlong_filter_of_everything_leaves_no_update(tmp_path):
    write(tmp_path, _group(0, [(6, True, float(i)) for i in range(4)]))
    batch = batches(tmp_path, objective={"overlong_filter": True}).read(0)
    assert batch.updates == []
    assert batch.metrics["rollout/overlong_filtered"] == 3  # the other one failed anyway


def test_soft_overlong_penalty_is_added_to_the_reward(read):
    batch = read(reward={"overlong_buffer": 4})  # 0 up to 2 tokens, -1 at 6
    found = learned(batch)
    # Rewards of the first group: 0 - 1, 1 - 0, 1 - 1. The second group gains a signal from its lengths.
    advantages = {0: -1.0, 1: 1.0, 2: 0.0}
    micro = batch.updates[0].micro_batches
    first = [m.advantage[m.mask & (m.target_ids == 0)] for m in micro]
    assert float(torch.cat(first).min()) == pytest.approx(advantages[0])
    assert batch.metrics["rollout/groups_without_signal"] == 0
    lengths = [6, 2, 6, 3, 5, 4, 3, 6]
    assert batch.metrics["rollout/overlong_penalty_mean"] == pytest.approx(-np.mean([(n - 2) / 4 for n in lengths]))
    assert batch.metrics["rollout/reward_mean"] == pytest.approx(6 / 7)  # as the verifier gave them
    assert found


def test_ranks_share_a_step_without_overlap(read):
    parts = [read(rank=rank, size=2).updates[0] for rank in range(2)]
    assert parts[0].sequences == parts[1].sequences == 3  # of all ranks
    assert len(parts[0].micro_batches) == len(parts[1].micro_batches)
    tokens = [sum(int(m.mask.sum()) for m in part.micro_batches) for part in parts]
    assert sum(tokens) == 6 + 2 + 6


def test_groups_are_trained_on_in_the_order_of_prompts(tmp_path):
    """A resumed run stores them in another order and must add in the same one."""
    groups = [_group(position, GROUPS[0]) for position in (0, 1)]  # their advantages differ
    read = []
    for name, stored in (("a", groups), ("b", groups[::-1])):
        write(tmp_path / name, *stored)
        (update,) = batches(tmp_path / name, rollout={"prompts_per_step": 2}).read(0).updates
        read.append(torch.cat([micro.advantage for micro in update.micro_batches]))
    assert torch.equal(*read)


def test_an_evaluated_prompt_counts_as_progress(tmp_path):
    source = batches(tmp_path)
    metrics = RunDir(tmp_path / "run").rollout_metrics
    metrics.parent.mkdir(parents=True, exist_ok=True)
    append_json_line(metrics, {"step": 0})
    os.utime(metrics, (0, 0))
    before = source.progress()
    show_progress(metrics)
    assert source.progress() != before


def test_staleness_is_over_tokens_and_needs_no_group_to_be_read(monkeypatch, tmp_path):
    group = _group(0, GROUPS[0])
    versions = [np.full(len(r.token_ids), 3, np.int32) for r in group.rollouts]
    versions[0][2:] = 5
    newer = [dataclasses.replace(r, versions=v) for r, v in zip(group.rollouts, versions, strict=True)]
    write(tmp_path, dataclasses.replace(group, rollouts=tuple(newer)), _group(1, GROUPS[1]))
    source = batches(tmp_path)
    source._reader.refresh()
    monkeypatch.setattr(BankReader, "read", None)
    metrics = source._staleness(6, source._reader.entries(0, 2))
    tokens = np.concatenate(versions)
    lags = np.concatenate([6 - tokens, np.full(sum(length for length, *_ in GROUPS[1]), 6)])
    assert metrics["rollout/staleness_mean"] == pytest.approx(lags.mean())
    assert metrics["rollout/staleness_max"] == 6
    assert metrics["rollout/mixed_version_groups"] == 1
    assert source._staleness(6, source._reader.entries(0, 1))["rollout/staleness_max"] == 6 - 3  # of 3 and 5


def test_tokens_left_by_a_sampling_mask_are_counted_for_each_sampled_token(tmp_path):
    group = _group(0, GROUPS[0])
    masked = []
    for rollout, kept in zip(group.rollouts, (1, 2, 3, 4), strict=True):
        length = len(rollout.token_ids)
        mask = {"sampling_mask_ids": np.tile(np.arange(kept, dtype=np.int32), length)}
        mask["sampling_mask_counts"] = np.full(length, kept, np.int32)
        masked.append(dataclasses.replace(rollout, topk_ids=None, rollout_topk_logprob=None, **mask))
    write(tmp_path, dataclasses.replace(group, rollouts=tuple(masked)))
    source = batches(tmp_path, rollout={"top_k": 4})
    source._reader.refresh()
    kept = source._mask_metrics(source._reader.entries(0, 1))["rollout/kept_tokens_mean"]
    assert kept == (6 * 1 + 2 * 2 + 6 * 3 + 3 * 4) / (6 + 2 + 6 + 3)


def test_a_rank_that_does_not_see_the_batch_yet_waits_for_it(tmp_path, monkeypatch):
    source = batches(tmp_path)
    with BankWriter(tmp_path / "bank", 1) as writer:
        writer.append(_group(0, GROUPS[0]))
        assert source.read(0).updates
        writer.append(_group(1, GROUPS[0]))  # a segment of its own
    monkeypatch.setattr(bank_reader, "is_local", lambda _: False)
    hidden, exists = iter([True] * 3), BankReader._exists
    monkeypatch.setattr(BankReader, "_exists", lambda self, path: exists(self, path) and not next(hidden, False))
    assert source.read(1).updates
    assert next(hidden, None) is None


def test_a_bank_filled_under_other_settings_is_refused(read):
    for setting, value, says in (
        ("temperature", 0.5, r"rollout.temperature = 0.5: prompt 0 in the bank was sampled at 0.9"),
        ("group_size", 8, r"rollout.group_size = 8: prompt 0 in the bank has 4 samples"),
        ("topk_logprobs", 2, r"rollout.topk_logprobs = 2: prompt 0 in the bank has 4 top-K"),
        ("max_response_tokens", 5, r"_tokens = 5: prompt 0 in the bank has a response of 6 tokens, but rollout"),
        ("max_response_tokens", 7, r"_tokens = 7: prompt 0 in the bank has a response that was cut at 6 tokens"),
    ):
        with pytest.raises(ValueError, match=says):
            read(rollout={setting: value})


MIXTURE = {**QWEN3_MOE, "num_hidden_layers": 3, "num_experts": 4, "mlp_only_layers": []}


def test_routing_is_replayed_only_where_it_fits_the_model(tmp_path):
    write_config(tmp_path / "model", **MIXTURE)

    def read(routing: np.ndarray | None, name: str, replay: bool = True):
        group = _group(0, GROUPS[0])
        rollouts = tuple(
            dataclasses.replace(
                r, routed_experts=None if routing is None else np.stack([routing] * (len(r.token_ids) + 1))
            )
            for r in group.rollouts
        )
        write(tmp_path / name, dataclasses.replace(group, rollouts=rollouts))
        model = {"path": str(tmp_path / "model")}
        return batches(tmp_path / name, model=model, rollout={"routing_replay": replay}).read(0)

    fits = np.array([[0, 3], [2, 1], [1, 2]], np.uint8)
    (micro, *_) = read(fits, "fits").updates[0].micro_batches
    replayed = (micro.routed_experts >= 0).all(2).all(1)
    ends = micro.cu_seqlens[1:].long() - 1
    assert replayed.sum() == len(replayed) - len(ends)
    assert not replayed[ends].any()
    assert (micro.routed_experts[replayed] == torch.from_numpy(fits.astype(np.int16))).all()
    assert read(fits, "off", replay=False).updates[0].micro_batches[0].routed_experts is None
    for name, routing, says in (
        ("none", None, "prompt 0 in the bank has no routing, the model has 3 layers with 2 experts per token"),
        ("layers", fits[:1], "routing of 1 layers, 2 each"),
        ("range", fits + 1, "names expert 4, the model has 4"),
    ):
        with pytest.raises(ValueError, match=says):
            read(routing, name)


def test_a_buffer_longer_than_the_response_is_refused(tmp_path):
    config = task_config(tmp_path)
    longer = config.model_copy(update={"reward": config.reward.model_copy(update={"overlong_buffer": LONGEST + 1})})
    (violation,) = settings_problems(longer)
    assert violation.startswith("reward.overlong_buffer = 7: longer than rollout.max_response_tokens = 6")


def long_batches(directory: Path, groups: int, experts: int = 0, tokens: int = 2048, **rollout: Any):
    """Write a bank of long responses, and return f(rank, size, ...) -> the source of a rank that reads it."""
    write_config(directory / "model", **{**(MIXTURE if experts else {}), "max_position_embeddings": 2048})
    with BankWriter(directory / "bank", groups, fsync=False) as bank:
        for position in range(groups):
            bank.append(make_group(position, samples=8, shortest=50, longest=999, topk=20, experts=experts))
    shapes = {"prompts_per_step": groups, "group_size": 8, "max_response_tokens": 1024, "topk_logprobs": 20}
    config = task_config(
        directory,
        train={"updates_per_step": 1, "micro_batch_tokens": tokens},
        rollout={**shapes, "temperature": 0.75, **rollout},
    )
    return lambda *share: BankBatches(config, BankReader(directory / "bank"), build_objective("dppo_topk_tv"), *share)


@pytest.mark.parametrize("parts", [("core",), ("core", "topk"), ("core", "topk", "routes")])
def test_a_rank_reads_its_own_rows_and_the_parts_it_needs(tmp_path, monkeypatch, parts):
    """At DP 8 a rank reads at most 1.3 times its own rows; a middle stage (only `core`) no lists or routes."""
    groups, ranks = 32, 8
    source_of = long_batches(tmp_path, groups, experts=4, routing_replay="routes" in parts)
    real, read = os.preadv, 0

    def preadv(descriptor, buffers, offset):
        nonlocal read
        count = real(descriptor, buffers, offset)
        read += count
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    a_token = {"core": 12, "topk": 20 * 8, "routes": 3 * 2}
    total = 0
    for rank in range(ranks):
        read = 0
        source = source_of(rank, ranks, parts)
        reader = source._reader
        (update,) = source.read(0).updates
        tokens = sum(int(m.mask.sum()) for m in update.micro_batches)
        own = tokens * sum(a_token[part] for part in parts)
        fronts = sum(entry.front[0] for entry in reader.entries(0, groups))  # prompt and shapes of every group
        assert own <= read <= own + fronts
        assert "topk" not in parts or read <= 1.3 * own
        for micro in update.micro_batches:
            assert (micro.topk_ids is not None) == ("topk" in parts)
            assert (micro.routed_experts is not None) == ("routes" in parts)
        total += tokens
    assert total == sum(int(e.response_lengths[~e.reward_failed].sum()) for e in reader.entries(0, groups))


def test_a_rank_needs_the_parts_of_its_pipeline_stage(tmp_path):
    def parts(last: bool, held: tuple[int, ...] | None, objective=None, **acceptance) -> tuple[str, ...]:
        routing = None if held is None else SimpleNamespace(held_layers=held)
        config = task_config(tmp_path, acceptance=acceptance)
        actor = SimpleNamespace(config=config, layout=SimpleNamespace(is_last_stage=last), routing=routing)
        return parts_of(actor, objective or build_objective("m2po"))

    assert parts(False, None) == ("core",)
    assert parts(True, None) == ("core", "topk", "sampling_mask")
    assert parts(False, ()) == ("core",)
    assert parts(False, (0, 1)) == ("core", "routes")
    assert parts(True, (2,)) == ("core", "topk", "sampling_mask", "routes")
    assert parts(False, None, bound=0.1, divergence="objective") == ("core", "topk", "sampling_mask")
    assert parts(False, None, bound=0.1, divergence="binary_kl") == ("core",)
    taught = build_objective("m2po", distillation="sampled", distillation_coefficient=1.0)
    assert parts(False, None, taught) == ("core", "topk", "sampling_mask")


def test_a_bank_sampled_with_truncation_needs_its_settings(tmp_path):
    prompt = Prompt(0, 0, np.array([7, 8], np.int32), "", "")
    one, rewards = np.zeros(1, np.int32), np.zeros(2, np.float32)
    sample = Rollout(
        one, -np.ones(1, np.float32), one, "stop", sampling_mask_ids=one, sampling_mask_counts=np.ones(1, np.int32)
    )
    write(tmp_path, RolloutGroup(prompt, (sample, sample), rewards, rewards > 0, TEMPERATURE))
    source = batches(tmp_path, rollout={"group_size": 2, "topk_logprobs": 0})
    with pytest.raises(ValueError, match=r"rollout.top_p = 1.0, .*: prompt 0 in the bank was sampled with truncation"):
        source.read(0)
