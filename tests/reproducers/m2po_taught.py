"""M2PO with `distillation: sampled`: statistic of the batch, mask and loss must read the same A + ln(teacher / pi).

PYTHONPATH=. python tests/reproducers/m2po_taught.py
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch

from dppo_megatron.objectives import build_objective
from dppo_megatron.train.actor.forward import apply_objective
from dppo_megatron.train.trainer.batches import StepBatch, UpdateBatch
from dppo_megatron.train.trainer.policy_logprobs import with_batch_statistic
from dppo_megatron.types import TokenBatch

T = 4000


def tried(reward: str) -> bool:
    mu = -torch.rand(T) * 3 - 0.1
    old = mu + 0.35 * torch.randn(T)
    teacher = old + torch.randn(T)
    rewarded = float(reward != "no signal")
    advantage = rewarded * torch.randn(T)
    values = {
        "token_ids": torch.zeros(T, dtype=torch.long),
        "position_ids": torch.arange(T),
        "cu_seqlens": torch.tensor([0, T], dtype=torch.int32),
        "target_ids": torch.zeros(T, dtype=torch.long),
        "mask": torch.ones(T, dtype=torch.bool),
        "loss_weight": torch.ones(T) / T,
        "advantage": advantage,
        "rollout_logprob": mu,
        "old_logprob": old,
        "temperature": torch.ones(T),
        "teacher_logprob": teacher,
        "teacher_ids": torch.full((T, 1), -1, dtype=torch.int32),
        "teacher_topk_logprob": torch.zeros(T, 1),
    }
    batch = TokenBatch.from_columns(values)
    plain = build_objective(
        "m2po", distillation="sampled", distillation_coefficient=1.0, advantage_weight=1.0 if rewarded else 0.0
    )
    layout = SimpleNamespace(device="cpu", world_size=1, data_group=SimpleNamespace(size=lambda: 1))
    of_step = with_batch_statistic(plain, StepBatch([UpdateBatch([batch], 1, T, T, T)], {}), layout)

    def dropped(objective, later):
        """Return the tokens without gradient and the mean (ln old / mu)^2 of the others that move away from mu."""
        logprob = (old + later).requires_grad_()
        out = apply_objective(
            objective,
            batch,
            logprob=logprob,
            topk_logprob=torch.full((T, 1), -float("inf")).requires_grad_(),
            other_logprob=torch.log1p(-old.exp()),
            entropy=None,
            sequence_ids=None,
            vocab_size=50,
        )
        out.loss.sum().backward()
        lost = logprob.grad == 0
        away = (rewarded * advantage - (old - teacher)) * (old - mu) > 0
        return int(lost.sum()), float(((old - mu)[away & ~lost] ** 2).sum() / (away & ~lost).sum())

    first, own, later = dropped(of_step, 0.0), dropped(plain, 0.0), dropped(of_step, 0.3 * torch.randn(T))
    budget = plain.settings.second_moment_budget
    print(f"{reward}: dropped, mean (ln r)^2 left: trainer's {first}, a later update {later}, objective's own {own}")
    return first == own == later and 0.9 * budget < first[1] < budget


if __name__ == "__main__":
    torch.manual_seed(0)
    right = [tried(reward) for reward in ("no signal", "random signal")]
    print("right" if all(right) else "WRONG: the statistic and the loss read different advantages")
    sys.exit(not all(right))
