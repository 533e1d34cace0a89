"""examples/minimal/dppo.py: its loss is the package's, and it learns."""

import dppo
import pytest
import torch

from dppo_megatron.objectives import build_objective

from .cases import random_case


@pytest.mark.parametrize("delta", [0.02, 0.15, 0.2, 0.5])
@pytest.mark.parametrize("seed", range(20))
def test_its_loss_and_gradient_are_those_of_the_package(seed, delta):
    case = random_case(seed, tokens=64, drift=(0.1, 1.0, 3.0)[seed % 3])
    given = {key: case.call[key] for key in ("logprob", "rollout_logprob", "advantage")}
    out = build_objective("dppo_binary_tv", delta=delta)(**given, mask=case.call["mask"])
    loss = dppo.dppo_loss(**given, delta=delta)
    torch.testing.assert_close(loss, out.loss, rtol=1e-12, atol=0)
    assert torch.equal((loss == 0) & (given["advantage"] != 0), out.masked_tokens)
    actual, expected = (torch.autograd.grad(part.sum(), case.logits, retain_graph=True)[0] for part in (loss, out.loss))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def test_the_cases_hold_masked_tokens_of_both_signs():
    case = random_case(1, tokens=64, drift=1.0)
    out = build_objective("dppo_binary_tv", delta=0.15)(**case.call)
    masked, advantage = out.masked_tokens, case.call["advantage"]
    assert (masked & (advantage > 0)).any()
    assert (masked & (advantage < 0)).any()
    assert not masked.all()


@pytest.mark.slow
def test_a_short_run_learns(capsys):
    short = dppo.Settings(numbers=range(10, 40), warmup_batch=64, steps=30, prompts=24, lr=5e-4)
    before, after = dppo.run(short)
    assert after > before + 0.1
    assert "masked" in capsys.readouterr().out
