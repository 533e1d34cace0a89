"""Our presets against the losses that verl registers.

The known differences are tested as differences, not hidden by a tolerance; docs/objectives.md lists them.
"""

import pytest
import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

from dppo_megatron.objectives import reduce_metrics
from tests.integrations.rows import MASK, ours, policies

pytestmark = pytest.mark.integrations


def config(**fields):
    return ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=1, **fields)


def theirs(name: str, mode: str, mu, pi, advantage, **fields):
    loss, metrics = core_algos.get_policy_loss_fn(name)(
        old_log_prob=mu,
        log_prob=pi,
        advantages=advantage,
        response_mask=MASK.double(),
        loss_agg_mode=mode,
        config=config(**fields),
    )
    return loss, torch.autograd.grad(loss, pi)[0], metrics


@pytest.mark.parametrize(
    ("preset", "overrides", "verl_name", "fields"),
    [
        ("ppo_dual_clip", {}, "vanilla", {"clip_ratio": 0.2, "clip_ratio_c": 3.0}),
        (
            "ppo_dual_clip",
            {"epsilon_high": 0.28},
            "vanilla",
            {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0},
        ),
        ("dppo_binary_tv", {"ratio_cap": 1e4}, "dppo_tv", {"clip_ratio": 0.15, "clip_ratio_c": 1e4}),
        ("dppo_binary_tv", {"ratio_cap": 2.0}, "dppo_tv", {"clip_ratio": 0.15, "clip_ratio_c": 2.0}),
        ("dppo_binary_kl", {"ratio_cap": 1e4}, "dppo_kl", {"clip_ratio": 0.05, "clip_ratio_c": 1e4}),
        ("cispo", {"ratio_floor": 0.8, "ratio_cap": 1.28}, "cispo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}),
        ("gspo", {}, "gspo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
        ("gspo", {"epsilon": 0.3}, "gspo", {"clip_ratio_low": 0.3, "clip_ratio_high": 0.3}),
    ],
)
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("token_mean", "token-mean"),
        ("seq_mean_token_mean", "seq-mean-token-mean"),
        ("seq_mean_token_sum_norm", "seq-mean-token-sum-norm"),
    ],
)
def test_loss_and_gradient(preset, overrides, verl_name, fields, kind, mode):
    fields = {"clip_ratio_low": fields.get("clip_ratio"), "clip_ratio_high": fields.get("clip_ratio"), **fields}
    mu, _, pi, advantage = policies()
    their_loss, their_gradient, _ = theirs(verl_name, mode, mu, pi, advantage, **fields)
    our_loss, our_gradient, out = ours(preset, kind, mu, pi, advantage, **overrides)
    # verl adds 1e-8 to 0/0-guards of seq-mean-token-mean; our weights are fp32.
    assert our_loss.item() == pytest.approx(their_loss.item(), rel=1e-6, abs=2e-8)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-6, atol=1e-9)
    if "dppo" in preset or "ppo" in preset:
        assert out.masked_tokens.any()
        assert not out.masked_tokens.all()


def test_known_difference_epsilon_in_the_kl_tail():
    """verl adds 1e-8 to both complements. Near p = 1 its KL is low: a mask can fall the other way."""
    mu, _, pi, _ = policies()
    mu = torch.full_like(mu, -1e-7)
    pi = torch.full_like(pi, -3e-8).requires_grad_()
    advantage = torch.ones_like(mu)
    exact = (-torch.expm1(mu)) * (torch.expm1(mu) / torch.expm1(pi)).log() + mu.exp() * (mu - pi.detach())
    delta = 0.95 * exact[0, 0].item()
    bounds = {"clip_ratio": delta, "clip_ratio_low": delta, "clip_ratio_high": delta, "clip_ratio_c": 1e4}
    _, their_gradient, _ = theirs("dppo_kl", "token-mean", mu, pi, advantage, **bounds)
    _, our_gradient, out = ours("dppo_binary_kl", "token_mean", mu, pi, advantage, delta=delta)
    assert out.masked_tokens.all()
    assert (our_gradient == 0).all()
    assert (their_gradient[MASK] != 0).all()


def test_known_difference_zero_advantages_in_the_masked_share():
    """verl counts A = 0 as negative, and every token in the denominator; we leave A = 0 out of both."""
    mu, _, pi, advantage = policies()
    advantage = torch.where(torch.arange(4)[:, None] < 2, 0.0, advantage)
    bounds = {"clip_ratio": 0.15, "clip_ratio_low": 0.15, "clip_ratio_high": 0.15, "clip_ratio_c": 1e4}
    _, _, metrics = theirs("dppo_tv", "token-mean", mu, pi, advantage, **bounds)
    _, _, out = ours("dppo_binary_tv", "token_mean", mu, pi, advantage)
    shift = (pi.exp() - mu.exp()).detach()
    counted_as_negative = torch.where(advantage > 0, shift > 0.15, shift < -0.15)[MASK].double().mean()
    assert metrics["actor/pg_clipfrac"] == pytest.approx(counted_as_negative.item())
    assert reduce_metrics(out.metrics)["policy/masked_share"] != pytest.approx(metrics["actor/pg_clipfrac"])
