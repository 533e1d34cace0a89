"""Every method trains a tiny policy on a bank at TP 2, and its description heads the log."""

import functools
import math
from collections.abc import Callable

import pytest

from dppo_megatron.objectives import PRESETS, build_objective
from tests.support.tiny_task import STEPS, VOCAB
from tests.train.trainer.scenarios import train_cases

VARIANTS = {
    "dppo_topk_tv_old": ("dppo_topk_tv", {"anchor": "old"}),
    "pg_tis_mismatch": ("pg_is", {"importance": "old", "mismatch": "truncate", "mismatch_high": 2.0}),
    "dppo_reference_kl": ("dppo_binary_tv", {"reference_kl": "k3", "reference_kl_coefficient": 0.1}),
    "distillation": (
        "dppo_topk_tv",
        {"distillation": "jensen_shannon", "distillation_coefficient": 0.3, "distillation_steps": 2.0},
    ),
    "distillation_in_trainer": ("dppo_binary_tv", {"distillation": "forward_kl", "distillation_coefficient": 0.3}),
    "dppo_entropy": ("dppo_binary_tv", {"entropy_coefficient": 0.01}),
}
# The bank is never refreshed, so a policy that learns leaves a tight region of responses altogether and stands still.
WIDER = {
    "trm_max": {"response_delta": 5.0},
    "trm_mean": {"response_delta": 5.0},
    "flash_reinforce": {"response_delta": 1.0},
}
METHODS = {**{name: (name, WIDER.get(name, {})) for name in PRESETS}, **VARIANTS}
REFERENCE = "dppo_reference_kl"
OFTEN = {"dppo_binary_tv", "dppo_topk_tv", "drpo", "grpo", "nll", *VARIANTS}


def labels(chosen: Callable[[str, dict], bool] = lambda name, settings: True) -> list:
    """The methods for which `chosen(name, settings)`; those not trained before every commit are marked slow."""
    return [
        label if label in OFTEN else pytest.param(label, marks=pytest.mark.slow)
        for label, method in METHODS.items()
        if chosen(*method)
    ]


@pytest.fixture(scope="module")
def trained(ranks, task, tmp_path_factory):
    """f(label) -> the record of rank 0 of two, trained as in the method's paper; each method trains once."""
    directory = tmp_path_factory.mktemp("ranks")

    @functools.cache
    def train(label: str) -> dict:
        name, settings = METHODS[label]
        paper = {axis: getattr(PRESETS[name], axis) for axis in ("advantage", "aggregation")}
        objective = {"name": name, "settings": settings, **paper}
        cases = {label: {"objective": objective, "parallel": {"world_size": 2, "tensor": 2}}}
        if label == "distillation_in_trainer":
            teacher = {"path": str(task / "model"), "in_trainer": True}
            cases[label]["distillation"] = {"topk": 7, "teachers": {"start": teacher}}
        return ranks(2).run(train_cases, cases=cases, task=task, directory=directory)[0][label]

    return train


@pytest.mark.parametrize("label", labels())
def test_trains_without_error(trained, label):
    found = trained(label)
    assert found["steps"] == len(found["records"]) == STEPS
    assert len(found["updates"]) == 2 * STEPS
    for update in found["updates"]:
        assert math.isfinite(update["loss"])
        assert 0 < update["grad_norm"] < math.inf
        assert not update["skipped"]
        assert update["train/nonfinite_tokens"] == 0


@pytest.mark.parametrize("label", labels())
def test_the_log_begins_with_the_method_in_words(trained, label):
    name, settings = METHODS[label]
    words = build_objective(name, **settings).describe().splitlines()
    head = trained(label)["head"]
    assert head[: len(words)] == [f"method: {line}" for line in words]
    assert head[0].startswith(f"method: objective {name}: ")
    assert head[len(words)].startswith(f"advantage: {PRESETS[name].advantage}, aggregation: ")


@pytest.mark.parametrize("label", labels(lambda name, _: name != "nll"))
def test_the_first_update_is_on_policy(trained, label):
    """The policy sampled the bank itself: no token is outside the region, and every weight is 1."""
    first = trained(label)["updates"][0]
    assert first["mismatch/kl"] < 1e-9
    assert first["weight/min"] == pytest.approx(1, abs=1e-3)
    assert first["weight/max"] == pytest.approx(1, abs=1e-3)
    assert first.get("policy/masked_share", 0.0) == 0
    assert first["policy/divergence_max"] < 1e-4


@pytest.mark.parametrize("label", labels(lambda name, _: name != "nll"))
def test_the_policy_moves_away_from_the_rollouts(trained, label):
    updates = trained(label)["updates"]
    assert updates[-1]["mismatch/kl"] > 1e-4


@pytest.mark.parametrize("label", labels(lambda name, settings: build_objective(name, **settings).needs_old))
def test_the_old_policy_is_that_of_the_steps_start(trained, label):
    found = trained(label)
    first, second = found["updates"][-2:]  # of the last step: far from the rollouts by then
    assert first["mismatch_recomputed/k3"] == pytest.approx(first["mismatch/kl"], rel=1e-3)
    assert second["mismatch_recomputed/k3"] != pytest.approx(second["mismatch/kl"], rel=1e-3)
    name, settings = METHODS[label]
    if build_objective(name, **settings).settings.anchor == "old":
        assert first["policy/masked_share"] == 0
        assert first["policy/divergence_max"] < 1e-4 < second["policy/divergence_max"]
    assert all(record["time/recompute_s"] > 0 for record in found["records"])


def test_the_reference_is_the_start_model(trained):
    found = trained(REFERENCE)
    values = [update["train/reference_kl"] for update in found["updates"]]
    assert values[0] == pytest.approx(0, abs=1e-9)
    assert min(values[1:]) > 1e-6
    assert all(record["time/reference_s"] > 0 for record in found["records"])
    without = trained("dppo_binary_tv")
    assert found["updates"][0]["grad_norm"] == pytest.approx(without["updates"][0]["grad_norm"], rel=1e-4)
    assert found["updates"][-1]["mismatch/kl"] < without["updates"][-1]["mismatch/kl"]


def test_the_teacher_teaches_with_the_weight_of_its_schedule(trained):
    """The teacher is flatter: half the weight in the second step, none in the third."""
    updates = trained("distillation")["updates"]
    divergence = [update["distillation/divergence"] for update in updates]
    assert min(divergence) > 0
    assert all(0 < update["distillation/tail_mass_teacher"] < 1 for update in updates)
    plain = trained("dppo_topk_tv")["updates"]
    assert updates[0]["loss"] - plain[0]["loss"] == pytest.approx(0.3 * divergence[0], rel=1e-3)
    assert updates[0]["grad_norm"] != pytest.approx(plain[0]["grad_norm"], rel=1e-3)


def test_a_teacher_in_the_trainers_memory_teaches(trained):
    """Here it is the start model, so the first update is at the teacher."""
    found = trained("distillation_in_trainer")
    divergence = [update["distillation/divergence"] for update in found["updates"]]
    assert divergence[0] < 1e-6 < min(divergence[1:])
    assert all(record["time/teacher_s"] > 0 for record in found["records"])


def test_other_methods_pay_for_no_extra_pass(trained):
    for record in trained("dppo_binary_tv")["records"]:
        assert "time/teacher_s" not in record
        assert "time/recompute_s" not in record
        assert "time/reference_s" not in record


def test_masked_tokens_are_counted_by_id(trained):
    """The masked tokens of a step's two updates add up to its masked share."""
    found = trained("dppo_binary_tv")
    signed = [update["train/tokens"] * (1 - update["advantage/zero_share"]) for update in found["updates"]]
    masked = [update["policy/masked_share"] * count for update, count in zip(found["updates"], signed, strict=True)]
    by_step = [sum(masked[2 * step : 2 * step + 2]) for step in range(STEPS)]
    assert max(by_step) > 0
    for record, expected in zip(found["records"], by_step, strict=True):
        assert sum(record["masked_tokens"].values()) == pytest.approx(expected)
        assert all(0 <= token < VOCAB and count > 0 for token, count in record["masked_tokens"].items())
    assert not any(record["masked_tokens"] for record in trained("drpo")["records"])
