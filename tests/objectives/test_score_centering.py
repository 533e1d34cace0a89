"""Score centering: equal to the dense formula in every layout, zero in expectation, zero on policy."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dppo_megatron.objectives import ObjectiveError, TopKLogprobs, build_objective, reduce_metrics
from tests.objectives.cases import random_case, run
from tests.objectives.centred import PADDED, VOCAB, WEIGHTS, dense_gradient, given, gradient_through_kernels
from tests.support.ranks import TORCH, Ranks

K = 6
BOUND = {torch.float64: 1e-10, torch.float32: 1e-6}


@pytest.mark.parametrize("fused", [False, True], ids=["stored", "fused"])
@pytest.mark.parametrize("dtype", BOUND, ids=["fp64", "fp32"])
@pytest.mark.parametrize("k", [1, K, VOCAB])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_gradient_over_the_whole_vocabulary_is_the_dense_one(kind, k, dtype, fused):
    g = given(k)
    expected = dense_gradient(g, kind)
    if fused:
        expected = expected @ g.weight[:VOCAB]
    actual, _ = gradient_through_kernels(g, kind, dtype, fused=fused)
    if not fused:
        assert not actual[:, VOCAB:].any()
        actual = actual[:, :VOCAB]
    size = expected.abs().max().clamp(min=1)
    assert (actual.double() - expected).abs().max() <= BOUND[dtype] * size


def on_a_shard(rank: int, world: int, fused: bool) -> list[tuple[Tensor, dict[str, int]]]:
    return [
        gradient_through_kernels(given(K), kind, torch.float32, rank=rank, world=world, fused=fused) for kind in WEIGHTS
    ]


@pytest.fixture(scope="module", params=[2, 4], ids=["tp2", "tp4"])
def shards(request: pytest.FixtureRequest) -> Iterator[dict[bool, list]]:
    """fused -> the results of each rank."""
    with Ranks(request.param, "gloo", TORCH) as ranks:
        yield {fused: ranks.run(on_a_shard, world=request.param, fused=fused) for fused in (False, True)}


@pytest.mark.parametrize("number", range(len(WEIGHTS)), ids=list(WEIGHTS))
def test_sharded_vocabulary_with_one_collective_forward_and_none_backward(shards, number):
    kind = list(WEIGHTS)[number]
    expected = dense_gradient(given(K), kind)
    found = [rank[number] for rank in shards[False]]
    whole = torch.cat([gradient for gradient, _ in found], dim=1)
    assert whole.shape[1] == PADDED
    assert (whole[:, :VOCAB].double() - expected).abs().max() <= 1e-6 * expected.abs().max().clamp(min=1)
    assert all(collectives == {"forward": 1, "backward": 0} for _, collectives in found)
    through_head = expected @ given(K).weight[:VOCAB]
    for rank in shards[True]:
        gradient, collectives = rank[number]
        assert (gradient.double() - through_head).abs().max() <= 1e-6 * through_head.abs().max().clamp(min=1)
        assert collectives == {"forward": 1, "backward": 1}  # the reduction that every column-parallel head has


EFFECTIVE_SIZE = ("pg_is", {"batch_statistic": "effective_size", "centering": "policy"}, None)


def _of_every_sample(kind: str, mu: Tensor, logits: Tensor, k: int, advantage: float) -> tuple[Tensor, Tensor]:
    """(mean over a ~ mu, its largest term) of the gradient into one position's logits, each token sampled once."""
    vocab = mu.shape[0]
    leaf = logits.repeat(vocab, 1).requires_grad_()
    ln_pi, ids, every = leaf.log_softmax(-1), mu.topk(k).indices.repeat(vocab, 1), torch.arange(vocab)
    named = torch.zeros(vocab, vocab, dtype=torch.bool).scatter(1, ids, True).scatter(1, every[:, None], True)
    name, overrides, _ = WEIGHTS.get(kind, EFFECTIVE_SIZE)
    objective = build_objective(name, **overrides)
    if objective.needs_statistic:
        objective = replace(objective, statistic=torch.tensor(0.5, dtype=torch.float64))
    out = objective(
        logprob=ln_pi.diagonal(),
        mask=torch.ones(vocab, dtype=torch.bool),
        rollout_logprob=mu.log(),
        old_logprob=mu.log(),
        advantage=torch.full((vocab,), advantage, dtype=torch.float64),
        topk=TopKLogprobs(
            ids,
            mu.log()[ids],
            ln_pi.gather(1, ids),
            ln_pi.detach().masked_fill(named, -torch.inf).logsumexp(1),
            every,
            vocab,
        ),
    )
    gradient = torch.autograd.grad(out.loss.sum(), leaf)[0] * mu[:, None]
    return gradient.sum(0), gradient.abs().max()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("kind", [*WEIGHTS, "capped at the effective size"])
@pytest.mark.parametrize("k", [4, 12])
def test_constant_reward_has_no_gradient_in_expectation(kind, k, advantage):
    """With the same A for all samples the mean gradient over mu is zero; that of a sample is not."""
    generator = torch.Generator().manual_seed(k)
    logits = 2 * torch.randn(12, generator=generator, dtype=torch.float64)
    mu = (logits + torch.randn(12, generator=generator, dtype=torch.float64)).softmax(0)
    if k < 12:  # the tail as it is modelled: pi's, scaled
        tail = torch.ones(12, dtype=torch.bool).index_fill(0, mu.topk(k).indices, False)
        pi = logits.softmax(0)
        mu = torch.where(tail, pi * mu[tail].sum() / pi[tail].sum(), mu)
        assert set(mu.topk(k).indices.tolist()).isdisjoint(torch.nonzero(tail).flatten().tolist())
    mean, largest = _of_every_sample(kind, mu, logits, k, advantage)
    assert largest > 1e-2
    assert mean.abs().max() < 1e-12


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_tail_that_moves_far_is_still_many_tokens_that_do_not(kind, advantage):
    """40 unlisted tokens of equal mass move by 0.3 together, but none by the region's 0.05."""
    mu, pi = (torch.cat([torch.tensor([head]), torch.full((40,), (1 - head) / 40)]).double() for head in (0.7, 0.4))
    mean, largest = _of_every_sample(kind, mu / mu.sum(), (pi / pi.sum()).log(), 1, advantage)
    assert largest > 1e-2
    assert mean.abs().max() < 1e-12


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_on_policy_there_is_nothing_to_correct(kind, dtype):
    name, overrides, _ = WEIGHTS[kind]
    case = random_case(3, tokens=40, vocab=30, k=6, on_policy=True, dtype=dtype)
    out = run(name, case, **overrides)
    assert reduce_metrics(out.metrics)["centering/size"] < (1e-12 if dtype == torch.float64 else 1e-5)
    without = run(name, case, **{**overrides, "centering": "none"})
    gradients = [torch.autograd.grad(o.loss.sum(), case.logits, retain_graph=True) for o in (out, without)]
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-6)


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
