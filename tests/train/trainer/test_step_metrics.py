"""The record of a step, computed from its updates."""

import math

import pytest
import torch

from dppo_megatron.objectives import build_objective, reduce_metrics
from dppo_megatron.train.trainer.batches import UpdateBatch
from dppo_megatron.train.trainer.metrics import MismatchHistory, MismatchLimit, StepMetrics
from tests.support.updates import update_stats

ROLLOUT = torch.full((6,), -1.0)
FAR = 3.0  # nats, of one token in each update


def of_step(name: str, advantages: tuple[float, float] = (1.0, 1.0), branches: int = 1, **settings) -> StepMetrics:
    """Two updates of six tokens; engine and trainer differ on one token of the first, on two of the second.

    branches: of the one response of each update.
    """
    objective, collected = build_objective(name, **settings), StepMetrics()
    for update in (1, 2):
        policy = ROLLOUT.clone()
        policy[2] -= FAR
        policy[3] -= FAR * (update - 1) * 2
        parts = objective(
            logprob=policy,
            rollout_logprob=ROLLOUT,
            old_logprob=policy,
            advantage=torch.full((6,), advantages[update - 1]),
            mask=torch.ones(6, dtype=torch.bool),
            sequence_ids=torch.zeros(6, dtype=torch.long),
        ).metrics
        stats = update_stats(metrics=reduce_metrics(parts), parts=parts)
        collected.add_update(stats, UpdateBatch([], branches, 6, 6, 21, trajectories=1))
    return collected


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dppo_binary_tv", {}),
        ("gspo", {}),  # its ratio is that of the response
        ("pg_is", {"importance": "old"}),  # this one is 1 everywhere
        ("pg_is", {"importance": "none"}),
    ],
)
def test_mismatch_is_between_engine_and_trainer_whatever_the_ratio(name, settings):
    record = of_step(name, **settings).finish()
    assert record["mismatch/max_abs_logprob_difference"] == pytest.approx(FAR)
    assert record["mismatch/kl"] == pytest.approx((torch.tensor(-FAR).exp().item() - 1 + FAR) / 6)


def test_an_overflow_is_counted_and_has_no_gradient_norm():
    step = StepMetrics()
    assert "train/loss_scale" not in of_step("gspo").finish()
    for norm, scale, overflowed in ((0.5, 1024.0, False), (math.inf, 1024.0, True), (1.5, 512.0, False)):
        stats = update_stats(grad_norm=norm, loss_scale=scale, skipped=overflowed, overflowed=overflowed)
        step.add_update(stats, UpdateBatch([], 1, 6, 6, 21))
    record = step.finish()
    names = ("grad_norm", "skipped_updates", "overflowed_updates", "loss_scale")
    assert [record[f"train/{name}"] for name in names] == [1.0, 1.0, 1.0, 512.0]


def test_counts_and_times_of_a_step_are_sums_over_its_updates():
    step = StepMetrics()
    for sequences, rows, seconds in ((3, 40, 0.25), (2, 30, 0.5)):
        stats = update_stats(forward_backward_s=1.0, optimizer_s=seconds)
        step.add_update(stats, UpdateBatch([], sequences, 6, rows, 21))
    record = step.finish()
    names = ("train/sequences", "train/computed_rows", "train/tokens", "time/forward_backward_s", "time/optimizer_s")
    assert [record[name] for name in names] == [5.0, 70.0, 12.0, 2.0, 0.75]


def test_too_much_mismatch_ends_the_run():
    step = of_step("gspo")
    step.check_mismatch(0.5, 7)
    with pytest.raises(MismatchLimit, match=r"step 7: mismatch/kl = 0.342 .* rollout.max_mismatch_kl = 0.3"):
        step.check_mismatch(0.3, 7)


def test_a_jump_of_the_mismatch_is_reported_at_once(caplog):
    """The run's own history is the measure: usual values of experts in 16 bits would be an alarm in fp32."""
    history = MismatchHistory()
    for step, kl in enumerate([0.02, 0.01, 0.03, 0.02, 0.02, 0.05, 0.04]):
        history.add(step, kl)
    assert not caplog.records
    history.add(7, 0.11)
    assert "step 7: mismatch/kl jumped to 0.11 nats per token" in caplog.text
    assert "median over the last 7 steps is 0.02" in caplog.text
    history.add(8, float("nan"))
    assert "step 8: mismatch/kl jumped to nan" in caplog.text
    history.add(9, 0.02)
    history.add(10, None)
    assert len(caplog.records) == 2


def test_jumps_within_rounding_are_not_reported(caplog):
    history = MismatchHistory()
    for step, kl in enumerate([1e-9, 2e-9, 1e-9, 1e-9, 1e-9, 1e-7, 9e-4]):
        history.add(step, kl)
    assert not caplog.records


def test_a_limit_on_a_metric_that_the_objective_does_not_report_is_refused():
    step = of_step("gspo")
    step._updates[0][0].metrics.pop("mismatch/kl")
    step.check_mismatch(None, 1)
    with pytest.raises(MismatchLimit, match="reports no metric mismatch/kl"):
        step.check_mismatch(0.5, 1)


@pytest.mark.parametrize("branches", [1, 3])
def test_the_bounds_of_dppos_theorem(branches):
    """Two responses of six tokens, one in each update; a token that is e^-3 likelier, then two of which one e^-6."""
    step = of_step("dppo_binary_tv", branches=branches)
    assert not [name for name in step.finish() if name.startswith("bound/")]  # nobody has said how long responses are
    step.add({"rollout/response_tokens_max": 8.0})
    found = step.finish()
    probability = torch.tensor(-1.0).exp()
    falls = [torch.tensor(-nats).expm1().abs() for nats in (FAR, FAR, 2 * FAR)]
    assert found["bound/quadratic"] == pytest.approx((2 * 8 * 7 * (probability * falls[2]) ** 2).item(), rel=1e-5)
    assert found["bound/linear"] == pytest.approx((4 * sum(falls) / 2 / 2).item(), rel=1e-5)  # |r - 1| / 2, a response


def test_a_sign_without_tokens_in_the_first_update_is_not_taken_from_a_later_one():
    found = of_step("dppo_binary_tv", advantages=(1.0, -1.0)).finish()
    assert found["mismatch/kl_positive"] == found["mismatch/kl"]
    assert "train/loss" in found
    assert "mismatch/kl_negative" not in found
