"""Updates and log-probs: the same numbers in every packing and implementation; `tests/parallel` compares layouts."""

from __future__ import annotations

import math

import pytest
import torch

from tests.actor.scenarios import checkpoint, update
from tests.support.actor_cases import micro_batches, sequences
from tests.support.actor_ranks import run_scenario
from tests.support.ranks import Ranks


def assert_same_run(got: dict, expected: dict, *, rtol: float = 1e-5) -> None:
    for name in ("loss", "grad_norm", "masked", "entropy"):
        assert got[name] == pytest.approx(expected[name], rel=rtol, abs=1e-6), name
    torch.testing.assert_close(got["logprobs"], expected["logprobs"], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("world", ["one_rank", "two_ranks"])
def test_no_micro_batch_makes_the_host_wait_for_the_device(request, world):
    assert all(map(math.isfinite, request.getfixturevalue(world)(update.host_reads)))


def test_ids_of_another_model_are_named_before_they_reach_the_device(one_rank):
    messages = one_rank(update.wrong_ids)
    for name in ("token_ids", "target_ids", "topk_ids"):
        assert f"{name} of micro-batch 1 must be within" in messages[name]


def test_a_checkpoint_of_one_rank_continues_in_another_layout(one_rank, two_ranks):
    expected = one_rank(update.alone)["continued"]
    for got in two_ranks(checkpoint.from_one_rank):
        assert got["state"] == {"step": 3}
        assert_same_run(got, expected)


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


def test_packing_does_not_matter(one_rank):
    runs = one_rank(update.packing)
    for split in (3, 12):  # 12: every sequence by itself
        assert_same_run(runs[split], runs[1])
        assert runs["gspo", split] == pytest.approx(runs["gspo", 1], rel=1e-5)


@pytest.mark.parametrize("name", ["fused", "selective", "full", "plain_optimizer"])
def test_settings_that_change_no_number(one_rank, name):
    assert_same_run(one_rank(update.variants)[name], one_rank(update.alone))


def test_bf16_is_near_fp32(one_rank):
    coarse, fine = one_rank(update.variants)["bf16"], one_rank(update.alone)
    assert coarse["loss"][0] == pytest.approx(fine["loss"][0], abs=0.02)
    assert coarse["grad_norm"][0] == pytest.approx(fine["grad_norm"][0], rel=0.05)
    assert coarse["loss"][2] < coarse["loss"][0]


def assert_transformers_agrees(values: dict, *, atol: float = 1e-5, rel: float = 1e-5) -> None:
    for name in ("logprobs", "score"):
        torch.testing.assert_close(*values[name], rtol=1e-4, atol=atol)
    for name in ("loss", "grad_norm"):
        got, expected = values[name]
        assert got == pytest.approx(expected, rel=rel), name
    held, expected = values["frozen_biases"]
    assert held == expected


@pytest.mark.parametrize(
    ("size", "name"), [(n, name) for n, cases in update.AGAINST_TRANSFORMERS.items() for name in cases]
)
def test_transformers_agrees(on, size, name):
    bounds = {"atol": 0.5, "rel": 0.02} if name == "sinks_bf16" else {}
    assert_transformers_agrees(on(size, update.against_transformers)[name], **bounds)


@pytest.mark.slow
@pytest.mark.parametrize("family", update.WITH_EXPERTS)
def test_transformers_agrees_with_experts(on, family):
    for size, layouts in update.EXPERTS.items():
        for layout in layouts:
            assert_transformers_agrees(on(size, update.experts_against_transformers)[family, layout])


def test_non_finite_updates_change_nothing_and_stop_the_run(one_rank):
    values = one_rank(update.non_finite)
    assert values["skipped"] == [(True, 1), (True, 2)]
    assert values["unchanged"]
    assert values["recovered"] == (False, 0)
    assert [skipped for skipped, _, _ in values["reported"]] == [True, True]
    assert all(bad == tokens > 0 for _, bad, tokens in values["reported"])
    assert "3 updates in a row" in values["error"]
    assert "optimizer.lr" in values["error"]


def test_a_micro_batch_without_loss_adds_nothing(one_rank):
    values = one_rank(update.no_loss_rows)
    for name in ("loss", "grad_norm"):
        alone, both = values[name]
        assert both == pytest.approx(alone, rel=1e-6)
    assert values["nothing"] == (0.0, 0.0, False)
    assert not values["logprobs"].any()


def test_a_rank_with_nothing_to_learn_serves_its_experts(one_rank, two_ranks):
    (expected,) = one_rank(update.idle_rank).values()
    for layout, got in two_ranks(update.idle_rank).items():
        for mine, theirs in zip(got, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5), layout


def test_learning_rate(one_rank):
    rates = one_rank(update.schedules)
    assert rates["constant", 0] == [0.1] * 10
    assert rates["constant", 4] == pytest.approx([0.025, 0.05, 0.075] + [0.1] * 7)
    linear = rates["linear", 4]
    assert linear[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert linear[3:] == pytest.approx([0.1 - 0.015 * i for i in range(7)])  # ends at min_lr = 0.01
    assert rates["cosine", 0][0] == pytest.approx(0.1)
    assert rates["cosine", 0][-1] == pytest.approx(0.01)


@pytest.mark.slow
def test_a_rank_that_does_not_come_raises(models, tmp_path):
    with Ranks(2) as ranks:
        values = run_scenario(ranks, checkpoint.late_rank, models, tmp_path)
    assert 2 < values["seconds"] < 6
    assert "timed out" in values["error"].lower() or "timeout" in values["error"].lower()
