"""The metrics of an objective do not depend on micro-batches and ranks."""

import dataclasses
import math

import pytest
import torch

from dppo_megatron import objectives
from tests.objectives.cases import random_case

ALL = torch.ones(1000, dtype=torch.bool)


def samples(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(1000, generator=generator, dtype=torch.float64) - 4).exp()


def every_kind(value: torch.Tensor, where: torch.Tensor):
    return {
        "mean": objectives.mean_metric(value, where),
        "share": objectives.mean_metric(value > 0.1, where),
        "sum": objectives.sum_metric(value, where),
        "max": objectives.max_metric(value, where),
        "min": objectives.min_metric(value, where),
        "d": objectives.quantiles_metric(value, where),
        "ess": objectives.effective_size_metric(value, where),
    }


def test_each_kind_has_its_value():
    value = samples(0)
    where = torch.arange(1000) % 3 > 0
    kept = value[where]
    reduced = objectives.reduce_metrics(every_kind(torch.where(where, value, torch.nan), where))
    for name, wanted in {
        "mean": kept.mean(),
        "share": (kept > 0.1).double().mean(),
        "sum": kept.sum(),
        "max": kept.max(),
        "min": kept.min(),
        "ess": kept.sum() ** 2 / (len(kept) * (kept**2).sum()),
    }.items():
        assert reduced[name] == pytest.approx(wanted.item())
    for name, q in {"p50": 0.5, "p90": 0.9, "p99": 0.99}.items():
        exact = torch.quantile(kept, q, interpolation="higher").item()
        assert reduced[f"d/{name}"] == pytest.approx(exact, rel=0.07)


def test_quantiles_at_the_ends():
    value = torch.tensor([0.0, 1e-12, torch.inf, 5e3])
    reduced = objectives.reduce_metrics({"d": objectives.quantiles_metric(value, torch.ones(4, dtype=torch.bool))})
    assert reduced == {"d/p50": 0.0, "d/p90": 100.0, "d/p99": 100.0, "d/p999": 100.0}


def test_ranks_reduce_with_one_sum_and_one_max():
    ranks = [every_kind(samples(i), ALL) for i in range(3)]
    flat = [objectives.flatten_metrics(metrics) for metrics in ranks]
    sums = torch.stack([s for s, _ in flat]).sum(0)  # what all_reduce(SUM) and all_reduce(MAX) give
    maxima = torch.stack([m for _, m in flat]).amax(0)
    over_ranks = objectives.reduce_metrics(objectives.unflatten_metrics(ranks[0], sums, maxima))
    whole = torch.cat([samples(i) for i in range(3)])
    assert over_ranks == pytest.approx(objectives.reduce_metrics(every_kind(whole, ALL.repeat(3))), rel=1e-12)
    assert over_ranks == pytest.approx(objectives.reduce_metrics(objectives.merge_metrics(ranks)), rel=1e-12)


def test_nothing_to_reduce_is_left_out_not_nan():
    reduced = objectives.reduce_metrics(every_kind(samples(0), ~ALL))
    assert reduced == {"sum": 0.0}
    assert objectives.reduce_metrics({}) == {}


def test_different_metrics_do_not_merge():
    one, other = every_kind(samples(0), ALL), every_kind(samples(1), ALL)
    del other["max"]
    with pytest.raises(ValueError, match="differ between the parts to merge: max"):
        objectives.merge_metrics([one, other])
    with pytest.raises(ValueError, match="at least one"):
        objectives.merge_metrics([])
    with pytest.raises(ValueError, match="expected"):
        objectives.unflatten_metrics(other, *objectives.flatten_metrics(one))


@pytest.mark.parametrize(("name", "outside"), [("dppo_binary_tv", [0, 1, 3]), ("ppo", [0, 1, 2, 3])])
def test_the_outside_share_counts_tokens_that_move_in_either_direction(name, outside):
    """Six tokens, the last without loss: all move, those that move back and those without advantage too."""
    mu = torch.tensor([0.5, 0.5, 0.01, 0.5, 0.5, 0.5], dtype=torch.float64)
    pi = torch.tensor([0.9, 0.1, 0.05, 0.9, 0.52, 0.9], dtype=torch.float64)
    advantage = torch.tensor([1.0, 1.0, -1.0, 0.0, -2.0, 1.0], dtype=torch.float64)
    mask = torch.arange(6) < 5
    entropy = torch.arange(6.0, dtype=torch.float64)
    out = objectives.build_objective(name)(
        logprob=pi.log(), rollout_logprob=mu.log(), advantage=advantage, mask=mask, entropy=entropy
    )
    found = objectives.reduce_metrics(out.metrics)
    beyond = torch.isin(torch.arange(6), torch.tensor(outside)).double()
    ratio = pi / mu
    divergence = (ratio - 1).abs() if name == "ppo" else (pi - mu).abs()
    k3 = ratio - 1 - ratio.log()
    values = {"policy/outside_share": beyond, "train/entropy": entropy, "mismatch/kl": k3}
    for sign, where in {"": slice(0, 5), "_positive": slice(0, 2), "_negative": [2, 4]}.items():
        for metric, value in values.items():
            assert found[metric + sign] == pytest.approx(value[where].mean().item())
        assert found[f"policy/divergence{sign or '_mean'}"] == pytest.approx(divergence[where].mean().item())
    assert found["mismatch/total_variation"] == pytest.approx((ratio[:5] - 1).abs().mean().item() / 2)


def test_the_total_variation_of_samples_is_that_of_the_policies():
    mu, pi = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.5, 0.4, 0.1]).double()
    tokens = mu.multinomial(200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(len(tokens), dtype=torch.float64)
    out = objectives.build_objective("pg_is")(
        logprob=pi.log()[tokens], rollout_logprob=mu.log()[tokens], advantage=ones, mask=ones.bool()
    )
    assert objectives.reduce_metrics(out.metrics)["mismatch/total_variation"] == pytest.approx(0.2, rel=0.01)


def test_masked_share_by_sign_leaves_out_zero_advantages():
    case = random_case(6, tokens=60, drift=2.0)
    out = objectives.build_objective("dppo_binary_tv")(**case.call)
    advantage, masked = case.call["advantage"], out.masked_tokens
    assert (advantage == 0).sum() == 12
    reduced = objectives.reduce_metrics(out.metrics)
    for sign, where in {"": advantage != 0, "_positive": advantage > 0, "_negative": advantage < 0}.items():
        assert 0 < reduced[f"policy/masked_share{sign}"] == pytest.approx(masked[where].double().mean().item())
    assert reduced["advantage/zero_share"] == pytest.approx(0.2)
    symmetric = objectives.build_objective("ipo")(**case.call)
    assert not symmetric.masked_tokens[advantage == 0].any()


@pytest.mark.parametrize(
    ("ratios", "share"),
    [
        ([torch.inf, 1.0, 1.0, 1.0], 1 / 4),
        ([torch.inf] * 2 + [1.0] * 2, 2 / 4),
        ([1e300] * 4, 1),
        ([3e38, 0, 0, 0], 1 / 4),
    ],
)
def test_effective_sample_size_of_ratios_that_overflow(ratios, share):
    """Over two micro-batches."""
    weight, where = torch.tensor(ratios, dtype=torch.float64), torch.ones(2, dtype=torch.bool)
    halves = [{"ess": objectives.effective_size_metric(half, where)} for half in weight.view(2, 2)]
    assert objectives.reduce_metrics(objectives.merge_metrics(halves))["ess"] == pytest.approx(share)


def test_effective_sample_size_is_a_number_where_an_uncapped_ratio_is_infinite():
    case = random_case(7, tokens=50, drift=1.0)
    case.call["rollout_logprob"][3] -= 800
    reduced = objectives.reduce_metrics(objectives.build_objective("pg_is")(**case.call).metrics)
    assert reduced["policy/ratio_max"] == torch.inf
    assert reduced["ratio/effective_sample_size"] == pytest.approx(1 / 50)


def test_mismatch_ratio_and_tail_by_their_formulas():
    case = random_case(7, tokens=50, drift=1.0)
    mu, pi = case.call["rollout_logprob"], case.call["logprob"].detach()
    ratio = (pi - mu).exp()
    out = objectives.build_objective("dppo_topk_tv", ratio_cap=1.5)(**case.call)
    reduced = objectives.reduce_metrics(out.metrics)
    used = ratio.clamp(max=1.5)
    binary = objectives.build_objective("dppo_binary_tv")(**case.call).divergence
    signed = case.call["advantage"] != 0
    wanted = {
        "train/tokens": 50.0,
        "train/nonfinite_tokens": 0.0,
        "mismatch/k1": (mu - pi).mean(),
        "mismatch/kl": (ratio - 1 - (pi - mu)).mean(),
        "mismatch/shift_max": (pi.exp() - mu.exp()).abs().max(),
        "mismatch/shift_mean": (pi.exp() - mu.exp()).abs().mean(),
        "mismatch/max_abs_logprob_difference": (pi - mu).abs().max(),
        "policy/ratio_min": ratio.min(),
        "policy/ratio_max": ratio.max(),
        "ratio/mean": ratio.mean(),
        "ratio/effective_sample_size": used.sum() ** 2 / (50 * used.square().sum()),
        "ratio/capped_share": (ratio > 1.5)[signed].double().mean(),
        "policy/divergence_max": out.divergence.max(),
        "policy/divergence_mean": out.divergence.mean(),
        "loss/token_mean": out.loss.detach().mean(),
        "weight/mean": out.weight[signed].mean(),
        "weight/min": out.weight[signed].min(),
        "weight/max": out.weight[signed].max(),
        "topk/binary_tv_mean": (pi.exp() - mu.exp()).abs().mean(),
        "topk/topk_tv_mean": out.divergence.mean(),
        "topk/binary_disagreement": ((binary > 0.15) != (out.divergence > 0.15))[signed].double().mean(),
        "topk/tail_mass_policy": case.topk.other_logprob.exp().mean(),
        "topk/sampled_outside_share": (case.topk.ids != case.topk.target_ids[:, None]).all(1).double().mean(),
    }
    for name, value in wanted.items():
        assert reduced[name] == pytest.approx(float(value)), name
    assert reduced["topk/binary_disagreement"] > 0
    assert reduced["divergence/p50"] == pytest.approx(out.divergence.median().item(), rel=0.2)


def test_the_mismatch_of_recomputed_log_probs_is_that_of_the_old_policy():
    case = random_case(7, tokens=50, drift=1.0)
    mu = case.call["rollout_logprob"]
    out = objectives.build_objective("pg_is", importance="old")(**{**case.call, "old_logprob": mu + 0.1})
    reduced = objectives.reduce_metrics(out.metrics)
    assert reduced["mismatch_recomputed/k3"] == pytest.approx(math.exp(0.1) - 1 - 0.1)
    assert reduced["mismatch_recomputed/k1"] == pytest.approx(-0.1)


def test_padding_topk_log_probs_of_zero_do_not_pollute_the_metrics():
    """Padding of 0.0 reads as probability 1; positions outside the mask must not reach a metric."""
    case = random_case(8, tokens=10)
    keep = torch.arange(10) < 6
    padded = {
        f.name: torch.where(keep[:, None], getattr(case.topk, f.name), 0)
        for f in dataclasses.fields(case.topk)
        if f.name in ("ids", "rollout_logprob", "logprob")
    }
    objective = objectives.build_objective("dppo_topk_kl")
    clean = objective(**{**case.call, "mask": keep})
    dirty = objective(**{**case.call, "mask": keep, "topk": dataclasses.replace(case.topk, **padded)})
    assert objectives.reduce_metrics(clean.metrics) == objectives.reduce_metrics(dirty.metrics)


def test_non_finite_losses_are_counted():
    case = random_case(8, tokens=10)
    broken = torch.where(torch.arange(10) == 3, torch.nan, case.call["rollout_logprob"])
    out = objectives.build_objective("dppo_binary_tv")(**{**case.call, "rollout_logprob": broken})
    assert objectives.reduce_metrics(out.metrics)["train/nonfinite_tokens"] == 1
