"""Our losses as SkyRL calls them."""

import sys
import typing

import cloudpickle
import pytest
import torch
import typing_extensions

if sys.version_info < (3, 12):  # SkyRL needs 3.12; before it pydantic accepts only this TypedDict
    typing.TypedDict = typing_extensions.TypedDict

from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, apply_loss_reduction_to_advantages_minibatch
from skyrl.train.config import AlgorithmConfig

from dppo_megatron.integrations.skyrl import SkyRLLoss, register
from dppo_megatron.objectives import ObjectiveError, build_objective
from tests.integrations.rows import MASK, ours, policies

pytestmark = pytest.mark.integrations

CONFIG = AlgorithmConfig()


def inputs(reduction: str):
    mu, old, pi, advantages = policies()
    divided = apply_loss_reduction_to_advantages_minibatch(advantages, MASK.double(), reduction, 4, max_seq_len=9)
    return mu, old, pi, advantages, divided


@pytest.mark.parametrize(
    ("reduction", "kind"),
    [
        ("token_mean", "token_mean"),
        ("sequence_mean", "seq_mean_token_mean"),
        ("seq_mean_token_sum_norm", "seq_mean_token_sum_norm"),
    ],
)
@pytest.mark.parametrize("preset", ["dppo_binary_tv", "dppo_binary_kl", "drpo_tr", "minirl", "gspo", "vespo", "opsm"])
def test_a_registered_loss_is_the_objective(preset, reduction, kind):
    mu, old, pi, advantages, divided = inputs(reduction)
    loss, metrics = PolicyLossRegistry.get(f"dppo_megatron.{preset}")(
        pi, old, divided, config=CONFIG, loss_mask=MASK.double(), rollout_logprobs=mu
    )
    own, gradient, _ = ours(preset, kind, mu, pi, advantages, old)
    assert loss.item() == pytest.approx(own.item(), rel=1e-6, abs=1e-8)
    torch.testing.assert_close(torch.autograd.grad(loss, pi)[0], gradient, rtol=1e-6, atol=1e-9)
    assert all(isinstance(value, float) for value in metrics.values())


@pytest.mark.parametrize(("kind", "delta"), [("binary_tv", 0.15), ("binary_kl", 0.05)])
def test_ours_is_skyrls_own_dppo(kind, delta):
    mu, old, pi, _, divided = inputs("token_mean")
    config = AlgorithmConfig()
    config.dppo.dppo_type, config.dppo.delta_low, config.dppo.delta_high = kind, delta, delta
    given = {"config": config, "loss_mask": MASK.double(), "rollout_logprobs": mu}
    theirs, _ = PolicyLossRegistry.get("dppo")(pi, old, divided, **given)
    registered, _ = PolicyLossRegistry.get(f"dppo_megatron.dppo_{kind}")(pi, old, divided, **given)
    (their_gradient,), (our_gradient,) = torch.autograd.grad(theirs, pi), torch.autograd.grad(registered, pi)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-6, atol=1e-9)
    assert (our_gradient == 0)[MASK].any()
    assert our_gradient[MASK].any()


def test_the_registry_can_send_a_loss_to_other_processes():
    loss = cloudpickle.loads(cloudpickle.dumps(PolicyLossRegistry.get("dppo_megatron.drpo_tr")))
    assert loss.objective == build_objective("drpo_tr")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("score_centering", "reads the engine's list"),
        ("maspo", "depends on the size of A"),
        ("rollout_kl", "has a gradient where A = 0"),
    ],
)
def test_an_objective_that_skyrl_does_not_support_is_refused(name, why):
    with pytest.raises(ObjectiveError, match=f"{name} cannot be a loss of SkyRL: .*{why}"):
        register("mine", name)


def test_settings_without_effect_are_refused():
    mu, old, pi, _, divided = inputs("token_mean")
    loss = SkyRLLoss(build_objective("dppo_binary_tv"))
    with pytest.raises(ObjectiveError, match=r"generator.sampling_params.logprobs to 1"):
        loss(pi, old, divided, config=CONFIG, loss_mask=MASK)
    config = AlgorithmConfig()
    config.off_policy_correction.tis_ratio_type = "token"
    with pytest.raises(ObjectiveError, match="off_policy_correction has no effect"):
        loss(pi, old, divided, config=config, loss_mask=MASK, rollout_logprobs=mu)
