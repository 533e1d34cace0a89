"""Updates and log-probs: the same numbers in every packing and implementation; `tests/parallel` compares layouts."""

import contextlib
import math
import time
from dataclasses import replace
from typing import Any
from unittest import mock
from unittest.mock import ANY

import pytest
import torch

from dppo_megatron.objectives import build_objective
from tests.support.actor_cases import VOCAB, actor_config, micro_batches, pack, sequences, with_sampling_masks
from tests.support.actor_ranks import Rank, on_ranks, run_scenario
from tests.support.host_reads import no_host_reads
from tests.support.ranks import Ranks
from tests.train.actor.scenarios import update
from tests.train.actor.scenarios.parts import fingerprint, of_each_sequence, same, topk, train


def assert_same_run(got: dict, expected: dict, *, rtol: float = 1e-5) -> None:
    for name in ("loss", "grad_norm", "masked", "entropy"):
        assert got[name] == pytest.approx(expected[name], rel=rtol, abs=1e-6), name
    torch.testing.assert_close(got["logprobs"], expected["logprobs"], rtol=1e-4, atol=2e-5)


@on_ranks(1, 2)
def test_no_micro_batch_makes_the_host_wait_for_the_device(rank: Rank):
    """Run LossStep and LogprobStep in several layouts; a read of the host raises."""
    from dppo_megatron.train.actor import forward

    def unread(step):
        def checked(*args, **kwargs):
            with no_host_reads():
                return step(*args, **kwargs)

        return checked

    layouts = {"alone": {}}
    if rank.world_size == 2:
        layouts = {"tensor": {"tensor": 2}, "context": {"context": 2}}
    objectives = [topk(), build_objective("gspo", entropy_coefficient=0.1), build_objective("drpo")]
    patches = [(forward.LossStep, "loss"), (forward.LogprobStep, "collect")]
    with contextlib.ExitStack() as stack:
        for owner, name in patches:
            stack.enter_context(mock.patch.object(owner, name, unread(getattr(owner, name))))
        for layout in layouts.values():
            for settings in ({}, {"logits": "fused"}):
                with rank.actor(settings=settings, **layout) as actor:
                    batches = micro_batches(sequences(), 2)
                    losses = [actor.train_update(batches, objective).loss for objective in objectives]
                    actor.scores(batches, topk=True)
                    losses.append(actor.train_update([*map(with_sampling_masks, batches)], objectives[0]).loss)
                    assert all(map(math.isfinite, losses))


@on_ranks(1)
def test_the_norm_of_a_large_gradient_does_not_depend_on_its_shards(rank: Rank):
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    with rank.actor():
        whole, world = (
            torch.randn(1 << 12, 1 << 12, generator=torch.Generator().manual_seed(0)),
            torch.distributed.group.WORLD,
        )
        norms = [get_grad_norm_fp32([*whole.chunk(shards)], grad_stats_parallel_group=world) for shards in (1, 3)]
    assert norms == pytest.approx([float(whole.double().norm())] * 2, rel=3e-7)


@on_ranks(1)
def test_ids_of_another_model_are_named_before_they_reach_the_device(rank: Rank):
    with rank.actor() as actor:
        for name in ("token_ids", "target_ids", "topk_ids"):
            right, wrong = micro_batches(sequences(), 2)
            ids = getattr(wrong, name).clone()
            ids[3] = VOCAB
            with pytest.raises(ValueError, match=f"{name} of micro-batch 1 must be within"):
                actor.train_update([right, replace(wrong, **{name: ids})], topk())


@on_ranks(1)
def test_packing_does_not_matter(rank: Rank):
    """12 micro-batches: every sequence by itself."""
    runs, gspo = {}, {}
    # Ratios of whole responses, an entropy term with a gradient, and sequences none of whose tokens carries loss.
    objective = build_objective("gspo", entropy_coefficient=0.1)
    parts = sequences()
    parts[3]["mask"][:] = False
    parts[3]["loss_weight"] = parts[3]["loss_weight"] * 0
    for split in (1, 3, 12):
        with rank.actor() as actor:
            runs[split] = train(actor, sequences(), updates=1, split=split)
        with rank.actor() as actor:
            stats = actor.train_update(micro_batches(parts, split), objective)
            gspo[split] = stats.loss, stats.grad_norm
    for split in (3, 12):
        assert_same_run(runs[split], runs[1])
        assert gspo[split] == pytest.approx(gspo[1], rel=1e-5)


def test_scores_of_top_k_ids_and_of_the_reference(one_rank, two_ranks):
    alone = one_rank(update.scores)["alone"]
    batches = micro_batches(sequences(), 3)
    mask, targets, ids = (torch.cat([getattr(b, f) for b in batches]) for f in ("mask", "target_ids", "topk_ids"))
    target_in_topk = (ids == targets[:, None]).any(1)
    mass = alone["topk"].exp().sum(1) + alone["other"].exp() + torch.where(target_in_topk, 0, alone["targets"].exp())
    torch.testing.assert_close(mass[mask], torch.ones(int(mask.sum())))
    for name in ("targets", "topk", "other"):
        assert not alone[name][~mask].any()
    for layout, got in two_ranks(update.scores).items():
        for name, expected in alone.items():
            torch.testing.assert_close(got[name], expected, rtol=1e-4, atol=2e-5, msg=f"{layout}: {name}")
    torch.testing.assert_close(alone["reference"], alone["targets"])  # the start model, whatever was learnt since
    assert (alone["moved"] - alone["targets"]).abs().max() > 1e-3


def test_a_teacher_in_the_trainers_memory_lists_its_most_likely_tokens(one_rank, two_ranks, models):
    """By transformers: the log-probs of the targets and the most likely tokens of every loss row."""
    from transformers import AutoModelForCausalLM

    scorer, exact, batches = AutoModelForCausalLM.from_pretrained(models / "wider"), [], micro_batches(sequences(), 3)
    with torch.no_grad():
        for batch in batches:
            for ids in batch.token_ids.tensor_split(batch.cu_seqlens[1:-1].long()):
                exact.append(scorer(ids[None]).logits[0].log_softmax(-1))
    mask, targets = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("mask", "target_ids"))
    exact = torch.cat(exact)[mask]
    for layout, got in {**one_rank(update.trainer_teacher), **two_ranks(update.trainer_teacher)}.items():
        logprob, ids, listed = (got[f"teacher_{name}"][mask] for name in ("logprob", "ids", "topk_logprob"))
        close = {"rtol": 1e-4, "atol": 2e-5, "msg": layout}
        torch.testing.assert_close(logprob, exact.gather(1, targets[mask][:, None])[:, 0], **close)
        torch.testing.assert_close(listed, exact.topk(update.TEACHER_K).values, **close)
        torch.testing.assert_close(listed, exact.gather(1, ids.long()), **close)
        assert all(len(set(row)) == update.TEACHER_K for row in ids.tolist())


def test_the_runs_learn_something(one_rank):
    run = one_rank(update.alone)
    assert len(set(run["loss"])) == 3
    assert 0 < run["masked"][-1] < 1
    assert sum(run["masked_tokens"][-1].values()) == pytest.approx(run["masked"][-1] * run["loss_tokens"][-1])
    mask = torch.cat([s["mask"] for s in sequences()])
    assert run["loss_tokens"] == [int(mask.sum())] * 3
    assert run["tokens"] == [len(mask)] * 3
    assert bool((run["logprobs"][~mask] == 0).all())
    assert bool((run["logprobs"][mask] < 0).all())


@pytest.mark.parametrize("name", ["fused", "selective", "full", "plain_optimizer"])
def test_settings_that_change_no_number(one_rank, name):
    assert_same_run(one_rank(update.variants)[name], one_rank(update.alone))


def test_bf16_is_near_fp32(one_rank):
    coarse, fine = one_rank(update.variants)["bf16"], one_rank(update.alone)
    assert coarse["loss"][0] == pytest.approx(fine["loss"][0], abs=0.02)
    assert coarse["grad_norm"][0] == pytest.approx(fine["grad_norm"][0], rel=0.05)
    assert coarse["loss"][2] < coarse["loss"][0]


def test_a_rank_with_nothing_to_learn_serves_its_experts(one_rank, two_ranks):
    (expected,) = one_rank(update.idle_rank).values()
    for layout, got in two_ranks(update.idle_rank).items():
        for mine, theirs in zip(got, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5), layout


def test_a_checkpoint_of_one_rank_continues_in_another_layout(one_rank, ranks, models, tmp_path):
    expected = one_rank(update.alone)["continued"]
    for got in run_scenario(ranks(2), from_one_rank, models, tmp_path):
        assert_same_run(got, expected)


def from_one_rank(rank: Rank) -> list[dict]:
    """Continue in several layouts from the checkpoint that one rank saved after three updates."""
    results = []
    for layout in ({"tensor": 2}, {}, {"pipeline": 2}):
        with rank.actor(**layout) as actor:
            assert actor.load_checkpoint(rank.models.parent / "from_one_rank") == {"step": 3}
            results.append(train(actor, sequences(seed=1), updates=2))
    return results


SP, SINKS = {"tensor": 2, "sequence": True}, {"tensor": 2, "sequence": True, "expert_tensor": 1}
AGAINST_TRANSFORMERS: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {  # ranks -> name -> family, layout
    1: {
        **{family: (family, {}) for family in ("qwen3", "llama", "qwen3_5", "qwen3_5_moe", "gpt_oss")},
        "sinks_recompute": ("gpt_oss", {"settings": {"recompute": "full"}}),
        "sinks_bf16": ("gpt_oss", {"settings": {"dtype": "bf16"}}),
    },
    2: {
        "delta_net_tensor": ("qwen3_5", {"tensor": 2}),
        "delta_net_sequence": ("qwen3_5", SP),
        "delta_net_recompute": ("qwen3_5", {**SP, "settings": {"recompute": "full"}}),
        "delta_net_experts": ("qwen3_5_moe", {**SP, "expert": 2, "expert_tensor": 1}),
        "sinks_tensor": ("gpt_oss", SINKS),
        "sinks_experts": ("gpt_oss", {**SINKS, "expert": 2}),
        "sinks_context": ("gpt_oss", {"context": 2}),
        "sinks_stages": ("gpt_oss", {"pipeline": 2}),
    },
}
WITH_BIAS = ("deepseek", "moonlight", "kimi_k2", "glm4_moe")
EXPERTS = {1: [{}], 2: [SP, {**SP, "expert": 2, "expert_tensor": 1}]}


def assert_transformers_agrees(rank: Rank, family: str, *, atol: float = 1e-5, rel: float = 1e-5, **layout) -> None:
    """Log-probs, scores, and loss and gradient norm of nll are those of transformers."""
    from transformers import AutoModelForCausalLM

    parts = sequences()
    batch = replace(pack(parts), temperature=None)
    model = AutoModelForCausalLM.from_pretrained(rank.models / family, dtype=torch.float32)
    expected, loss = of_each_sequence(lambda ids: model(ids).logits[0], parts, tempered=False)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    with rank.actor(family, **layout) as actor:
        logprobs = actor.logprobs([batch])[0]
        score = actor.score(parts[1]["token_ids"].numpy())
        biases = expert_biases(actor)
        stats = actor.train_update([batch], build_objective("nll"))
        assert all(map(torch.equal, biases, expert_biases(actor)))
        assert len(biases) == (3 if family in WITH_BIAS else 0)
    whole = model(parts[1]["token_ids"][None]).logits[0].log_softmax(-1)[:-1].detach()
    scored = whole.gather(1, parts[1]["token_ids"][1:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=atol)
    torch.testing.assert_close(torch.as_tensor(score), scored, rtol=1e-4, atol=atol)
    assert stats.loss == pytest.approx(float(loss), rel=rel)
    assert stats.grad_norm == pytest.approx(float(norm), rel=rel)


def expert_biases(actor) -> list[torch.Tensor]:
    return [b.clone() for c in actor.model_chunks for name, b in c.named_buffers() if name.endswith("expert_bias")]


@pytest.mark.parametrize(("size", "name"), [(n, name) for n, cases in AGAINST_TRANSFORMERS.items() for name in cases])
@on_ranks()
def test_transformers_agrees(rank: Rank, name: str):
    family, layout = AGAINST_TRANSFORMERS[rank.world_size][name]
    bounds = {"atol": 0.5, "rel": 0.02} if name == "sinks_bf16" else {}
    assert_transformers_agrees(rank, family, **bounds, **layout)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", *WITH_BIAS])
@on_ranks(1, 2)
def test_transformers_agrees_with_experts(rank: Rank, family: str):
    for layout in EXPERTS[rank.world_size]:
        assert_transformers_agrees(rank, family, **layout)


@on_ranks(1)
def test_non_finite_updates_change_nothing_and_stop_the_run(rank: Rank):
    """Train on infinite gradients, then with NaN weights, until training stops."""
    from dppo_megatron.train.actor import TrainingDiverged

    good = micro_batches(sequences(), 2)
    row = int(good[1].mask.nonzero()[2])
    far = good[1].rollout_logprob.index_fill(0, torch.tensor(row), -99.0)
    bad = [good[0], replace(good[1], rollout_logprob=far, loss_weight=good[1].loss_weight * float("inf"))]
    with rank.actor(optimizer={"max_skipped_in_a_row": 3}) as actor:
        actor.train_update(good, topk())
        before, lr = fingerprint(actor), actor.lr
        for number in (1, 2):
            with mock.patch("dppo_megatron.train.actor.actor.log.warning") as warned:
                stats = actor.train_update(bad, topk())
            assert (stats.skipped, stats.skipped_in_a_row) == (True, number)
            outlier = warned.call_args.args[-1]
            assert outlier.startswith(f"token {int(good[1].target_ids[row])} has ln pi = -")
            assert outlier.endswith(f", ln mu = -99, A = {float(good[1].advantage[row]):.6g}")
        assert same(before, fingerprint(actor))
        assert actor.lr == lr
        recovered = actor.train_update(good, topk())
        assert (recovered.skipped, recovered.skipped_in_a_row) == (False, 0)
        with torch.no_grad():
            actor.model_chunks[0].decoder.final_layernorm.weight[0] = float("nan")
        for _ in range(2):
            stats = actor.train_update(good, topk())
            assert stats.skipped
            assert stats.nonfinite_tokens == stats.loss_tokens > 0
        with pytest.raises(TrainingDiverged, match=r"(?s)3 updates in a row.*optimizer\.lr"):
            actor.train_update(good, topk())


@on_ranks(1)
def test_a_micro_batch_without_loss_adds_nothing(rank: Rank):
    good = pack(sequences())
    empty = replace(good, mask=torch.zeros_like(good.mask), loss_weight=torch.zeros_like(good.loss_weight))
    with rank.actor() as actor:
        alone = actor.train_update([good], topk())
    with rank.actor() as actor:
        both = actor.train_update([good, empty], topk())
        assert both.loss == pytest.approx(alone.loss, rel=1e-6)
        assert both.grad_norm == pytest.approx(alone.grad_norm, rel=1e-6)
        nothing = actor.train_update([empty], topk())
        assert (nothing.loss, nothing.grad_norm, nothing.skipped) == (0.0, 0.0, False)
        assert not actor.logprobs([empty])[0].any()


@pytest.mark.parametrize(
    ("decay", "warmup", "decay_steps", "expected"),
    [
        ("constant", 0, None, [0.1] * 10),
        ("constant", 4, None, [0.025, 0.05, 0.075] + [0.1] * 7),
        # All end at min_lr = 0.01.
        ("linear", 4, None, [0.025, 0.05, 0.075] + [0.1 - 0.015 * i for i in range(7)]),
        ("cosine", 0, None, [0.1, *[ANY] * 8, 0.01]),
        ("cosine", 0, 5, [0.1, *[ANY] * 3, *[0.01] * 6]),
    ],
)
@on_ranks(1)
def test_learning_rate(rank: Rank, decay: str, warmup: int, decay_steps: int | None, expected: list):
    """Of each of the run's ten updates."""
    optimizer = {"lr": 0.1, "min_lr": 0.01, "decay": decay, "decay_steps": decay_steps, "warmup_updates": warmup}
    with rank.actor(optimizer=optimizer) as actor:
        rates = [actor.train_update([pack(sequences(3))], topk()).lr for _ in range(10)]
    assert rates == [value if value is ANY else pytest.approx(value) for value in expected]


@pytest.mark.slow
def test_a_rank_that_does_not_come_raises(models, tmp_path):
    with Ranks(2) as ranks:
        run_scenario(ranks, late_rank, models, tmp_path)


def late_rank(rank: Rank) -> None:
    """The other rank raises and does not wait for ever.

    The process group is broken afterwards, so this runs on ranks of its own.
    """
    from dppo_megatron.train.actor import Actor, init_layout

    rank.rendezvous()
    config = actor_config(rank.models / "qwen3", parallel={"world_size": 2, "tensor": 2, "timeout_s": 3})
    layout = init_layout(config)
    actor = Actor(config, layout)
    torch.distributed.barrier()
    raised, started = rank.directory / "raised", time.perf_counter()
    if rank.rank == 1:
        while not raised.exists() and time.perf_counter() - started < 60:
            time.sleep(0.05)
        return
    with pytest.raises(RuntimeError, match=r"(?i)timed out|timeout"):
        actor.logprobs([pack(sequences())])
    raised.touch()
    assert 2 < time.perf_counter() - started < 6
