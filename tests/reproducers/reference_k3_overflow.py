"""One token that the policy has left by 94 nats must not make reference_kl infinite, as loss, gradient or metric.

Run from a clone's root: PYTHONPATH=. python tests/reproducers/reference_k3_overflow.py
"""

import sys

import torch

from dppo_megatron.objectives import build_objective, reduce_metrics

nats = float((sys.argv[1:] or [94])[0])
logprob = [-1.0, -1.0 - nats, -2.0]
bad = False
for estimator in ("k1", "k2", "k3"):
    for gradient in ("unbiased", "estimator"):
        objective = build_objective(
            "dppo_binary_tv", reference_kl=estimator, reference_kl_coefficient=1e-3, reference_kl_gradient=gradient
        )
        policy = torch.tensor(logprob, requires_grad=True)
        out = objective(
            logprob=policy,
            rollout_logprob=torch.tensor(logprob),
            reference_logprob=torch.tensor([-1.1, -1.0, -2.2]),
            advantage=torch.tensor([1.0, 1.0, -1.0]),
            mask=torch.ones(3, dtype=torch.bool),
        )
        out.loss.sum().backward()
        found = float(out.loss.detach().sum()), policy.grad.tolist(), reduce_metrics(out.metrics)["train/reference_kl"]
        wrong = not (torch.isfinite(out.loss).all() and torch.isfinite(policy.grad).all())
        bad |= wrong
        print(f"{estimator} {gradient}: loss {found[0]:.3g} gradient {found[1]} metric {found[2]:.3g}")
sys.exit(bad)
