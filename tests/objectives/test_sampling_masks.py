"""Objectives over sampling masks whose tokens are all in the top-K list."""

import pytest
import torch

from dppo_megatron.objectives import Objective, ObjectiveSettings, TopKLogprobs, build_objective, inputs
from dppo_megatron.objectives.divergence import predicted_change
from dppo_megatron.vocab_parallel import token_statistics

T, V, K = 12, 11, 5
MOST = 4  # kept of a row: fewer than K, so that the list is the whole set


def given(seed: int = 0) -> dict[str, torch.Tensor]:
    """Draw policy logits, and mu over a few tokens of each row with its samples."""
    g = torch.Generator().manual_seed(seed)
    logits, other = torch.randn(2, T, V, dtype=torch.float64, generator=g)
    ids = torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(T)])
    counts = torch.randint(1, MOST + 1, (T,), generator=g)
    ids[torch.arange(K) >= counts[:, None]] = -1
    kept = torch.zeros(T, V, dtype=torch.bool).scatter_(1, ids.clamp(min=0), ids >= 0)
    kept |= torch.nn.functional.one_hot(ids[:, 0], V).bool()
    mu = other.masked_fill(~kept, -torch.inf).log_softmax(1)
    target = torch.multinomial(mu.exp(), 1, generator=g)[:, 0]
    return {"logits": logits, "mu": mu, "kept": kept, "counts": kept.sum(1), "ids": ids, "target": target,
            "advantage": torch.randn(T, dtype=torch.float64, generator=g)}  # fmt: skip


def run(name: str, g: dict[str, torch.Tensor], noise: float = 0.0, **settings):
    """Return the objective's output and the gradient by the logits, through token_statistics with the sets."""
    logits = g["logits"].clone().requires_grad_()
    stats = token_statistics(
        logits, g["target"], g["ids"], sampling_mask_ids=g["kept"].nonzero()[:, 1], sampling_mask_counts=g["counts"]
    )
    topk = TopKLogprobs(
        ids=g["ids"],
        rollout_logprob=g["mu"].gather(1, g["ids"].clamp(min=0)).masked_fill(g["ids"] < 0, -torch.inf) - noise,
        logprob=stats.topk_logprob,
        other_logprob=stats.other_logprob,
        target_ids=g["target"],
        vocab_size=g["counts"],
    )
    out = build_objective(name, **settings)(
        logprob=stats.logprob,
        mask=torch.ones(T, dtype=torch.bool),
        rollout_logprob=g["mu"].gather(1, g["target"][:, None])[:, 0],
        advantage=g["advantage"],
        topk=topk,
    )
    out.loss.sum().backward()
    return out, logits.grad


@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_divergences_are_exact_without_a_tail(noise: float):
    """If mu's probabilities add up to less than 1, the missing part is rounding, not a tail."""
    g = given()
    pi = g["logits"].masked_fill(~g["kept"], -torch.inf).log_softmax(1)
    p, q = g["mu"].exp(), pi.exp()
    gap = torch.where(g["kept"], g["mu"] - pi, 0.0)
    for name, exact in (("dppo_topk_kl", (p * gap).sum(1)), ("dppo_topk_tv", 0.5 * (p - q).abs().sum(1))):
        out, _ = run(name, g, noise, delta=0.1)
        torch.testing.assert_close(out.divergence, exact, atol=1e-12 + 3 * noise, rtol=0)


def test_nothing_outside_the_set_is_pushed():
    _, gradient = run("dppo_topk_tv", given(), delta=0.1)
    assert not gradient[~given()["kept"]].any()
    assert gradient[given()["kept"]].any()


@pytest.mark.parametrize("settings", [{"delta": 0.1}, {"delta": 0.3, "ratio_cap": 1.2}])
def test_score_centering_is_exact(settings: dict):
    """The mean over mu of the centred gradient, every token of the set drawn in turn, is 0 when A is 1 for all."""
    g = given(3)
    g["advantage"] = torch.ones(T, dtype=torch.float64)
    mean = torch.zeros(T, V, dtype=torch.float64)
    for token in range(V):
        drawn = g["kept"][:, token]
        own = {**g, "target": torch.where(drawn, token, g["target"])}
        _, gradient = run("dppo_binary_tv", own, centering="policy", **settings)
        mean += torch.where(drawn, g["mu"][:, token].exp(), 0.0)[:, None] * gradient
    assert mean.abs().max() < 1e-12
    _, uncentred = run("dppo_binary_tv", g, **settings)
    assert uncentred.abs().max() > 1e-2


def test_the_tail_of_a_shorter_list_is_spread_only_over_the_sampling_set():
    """`uniform` divides by the tokens of the set that are not listed, not by those of the vocabulary."""
    g = given(1)
    g["kept"] |= torch.nn.functional.one_hot(torch.arange(T) % V, V).bool()
    g["kept"][:, :3] = True
    g["counts"] = g["kept"].sum(1)
    g["ids"] = g["target"][:, None].clone()
    g["mu"] = g["logits"].roll(1, 1).masked_fill(~g["kept"], -torch.inf).log_softmax(1)
    pi = g["logits"].masked_fill(~g["kept"], -torch.inf).softmax(1)
    p = g["mu"].exp()
    own = torch.nn.functional.one_hot(g["target"], V).bool()
    (pi_rest, mu_rest) = ((x * ~own).sum(1) for x in (pi, p))
    pi_own, mu_own = ((x * own).sum(1) for x in (pi, p))
    exact = (
        pi_own - mu_own + pi_own * (mu_own - pi_own) + pi_rest * (mu_rest - pi_rest) / (g["counts"] - 1).clamp(min=1)
    )
    plain = Objective("test", ObjectiveSettings(control="none", importance="none"))
    tokens = inputs.check_and_clean(
        plain, logprob=pi_own.log(), mask=torch.ones(T), rollout_logprob=mu_own.log(), advantage=g["advantage"]
    )
    topk = TopKLogprobs(
        g["ids"], mu_own.log()[:, None], pi_own.log()[:, None], pi_rest.log(), g["target"], vocab_size=g["counts"]
    )
    buckets = inputs.make_buckets(plain, tokens, topk)
    torch.testing.assert_close(predicted_change(buckets, "uniform"), exact, atol=1e-12, rtol=0)
