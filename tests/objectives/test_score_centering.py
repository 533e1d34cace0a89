"""Score centering: equal to the dense formula in every layout, zero in expectation, zero on policy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dppo_megatron.objectives import ObjectiveError, build_objective, reduce_metrics
from tests.objectives.cases import random_case, run
from tests.objectives.centred import PADDED, VOCAB, WEIGHTS, dense_gradient, given, gradient_through_kernels
from tests.support.ranks import TORCH, Ranks

K = 6
BOUND = {torch.float64: 1e-10, torch.float32: 1e-6}


@pytest.mark.parametrize("dtype", BOUND, ids=["fp64", "fp32"])
@pytest.mark.parametrize("k", [1, K, VOCAB])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_gradient_over_the_whole_vocabulary_is_the_dense_one(kind, k, dtype):
    expected = dense_gradient(given(k), kind)
    actual, _ = gradient_through_kernels(given(k), kind, dtype)
    assert not actual[:, VOCAB:].any()
    size = expected.abs().max().clamp(min=1)
    assert (actual[:, :VOCAB].double() - expected).abs().max() <= BOUND[dtype] * size


def on_a_shard(rank: int) -> list[tuple[Tensor, dict[str, int]]]:
    return [gradient_through_kernels(given(K), kind, torch.float32, rank=rank, world=2) for kind in WEIGHTS]


def test_sharded_vocabulary_with_one_collective_forward_and_none_backward():
    with Ranks(2, "gloo", TORCH) as ranks:
        found = ranks.run(on_a_shard)
    for kind, *of_ranks in zip(WEIGHTS, *found, strict=True):
        expected = dense_gradient(given(K), kind)
        whole = torch.cat([gradient for gradient, _ in of_ranks], dim=1)
        assert whole.shape[1] == PADDED
        assert (whole[:, :VOCAB].double() - expected).abs().max() <= 1e-6 * expected.abs().max().clamp(min=1), kind
        assert all(collectives == {"forward": 1, "backward": 0} for _, collectives in of_ranks), kind


def test_metrics_say_how_much_the_list_holds_and_moves():
    case = random_case(5, tokens=30, vocab=20, k=5)
    metrics = reduce_metrics(run("score_centering", case).metrics)
    mu = case.topk.rollout_logprob.exp().sum(1).mean().item()
    pi = case.topk.logprob.exp().sum(1).mean().item()
    assert metrics["centering/mass_rollout"] == pytest.approx(mu)
    assert metrics["centering/mass_policy"] == pytest.approx(pi)
    assert metrics["centering/size"] > 0.1


def test_a_rejected_response_is_dropped_with_its_centering():
    case = random_case(6, tokens=12, drift=0.5)
    case.call["sequence_ids"] = torch.arange(12) // 4
    out = run("score_centering", case, rejection="any_token", rejection_high=1.5)
    ratio = (case.call["logprob"] - case.call["rollout_logprob"]).exp().view(3, 4)
    dropped = (ratio > 1.5).any(1).repeat_interleave(4)
    assert dropped.any()
    assert not dropped.all()
    assert (out.loss[dropped] == 0).all()


@pytest.mark.parametrize(
    ("name", "overrides", "says"),
    [
        ("pg_is", {}, "no effect"),
        ("drpo_tr", {}, "no effect"),
        ("gspo", {}, "ratio_level and mismatch_level must be 'token'"),
        ("minirl", {}, "cannot be 'old'"),
        ("dppo_topk_tv", {}, "its D must be that of one token"),
        ("cppo", {}, "read other tokens too"),
        ("vaco", {}, "read other tokens too"),
        ("nll", {}, "supervised=true"),
    ],
)
def test_refused_where_it_has_no_meaning(name, overrides, says):
    with pytest.raises(ObjectiveError, match=says):
        build_objective(name, centering="policy", **overrides)
    assert build_objective("drpo_tr", centering="policy", ratio_cap=3.0).needs_topk_gradient
