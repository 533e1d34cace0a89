"""Register the objectives as SkyRL 0.4 policy losses. docs/integrations.md.

Import this module in the entry point, before SkyRL checks the config. The module registers every preset that works in
SkyRL as `dppo_megatron.NAME`, for `trainer.algorithm.policy_loss_type`.
"""

from __future__ import annotations

from typing import Any

from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import off_policy_correction_enabled
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from torch import Tensor

from dppo_megatron.objectives import ObjectiveError, ObjectiveProtocol

from .padded import averaged, on_rows, presets_for, refuse_unfit, resolve, unfit


def reasons_against(objective: ObjectiveProtocol) -> list[str]:
    """Return why SkyRL's loss cannot be this objective.

    SkyRL sums the tokens, and has already divided the advantages by the denominators.
    """
    s = objective.settings
    scaled = {
        "has a gradient where A = 0, which SkyRL would not divide by the batch's tokens": (
            objective.moves_without_advantage
        ),
        "depends on the size of A, which SkyRL has divided by the batch's tokens": (
            s.control == "gate" and s.gate == "gaussian"
        ),
    }
    return unfit(objective, old=True) + [reason for reason, holds in scaled.items() if holds]


class SkyRLLoss:
    """Implements a policy loss as SkyRL calls it. mu is `rollout_logprobs`, the old policy `old_log_probs`.

    The objective defines the thresholds: `eps_clip_low` and similar settings have no effect. Raises ObjectiveError if
    `reasons_against` finds a reason against the objective.
    """

    def __init__(self, objective: ObjectiveProtocol):
        refuse_unfit(objective, "SkyRL", reasons_against(objective))
        self.objective = objective

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor | None,
        advantages: Tensor,
        config: Any,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the summed token losses (the advantages include the denominators), and metrics. Inputs are [B, T].

        Raises ObjectiveError without the rollout policy's log-probs, for `off_policy_correction`, and for 16-bit
        log-probs.
        """
        if rollout_logprobs is None:
            raise ObjectiveError(
                f"objective {self.objective.name} needs the rollout policy's log-probs: set "
                "generator.sampling_params.logprobs to 1"
            )
        if off_policy_correction_enabled(config.off_policy_correction):
            raise ObjectiveError(
                "trainer.algorithm.off_policy_correction has no effect on an objective of dppo_megatron: remove it; "
                "its axes mismatch, rejection and outlier_low / outlier_high are the same corrections"
            )
        out = on_rows(
            self.objective,
            mask=log_probs.new_ones(log_probs.shape) if loss_mask is None else loss_mask,
            logprob=log_probs,
            rollout_logprob=rollout_logprobs,
            old_logprob=old_log_probs,
            advantage=advantages,
        )
        return out.loss.sum(), averaged(out)


def register(name: str, objective: str | ObjectiveProtocol, **settings: Any) -> None:
    """Register an objective, or a preset with any axis overridden, as SkyRL's `policy_loss_type: name`.

    Raises ObjectiveError as `SkyRLLoss` does, and SkyRL's ValueError if the name is taken.
    """
    PolicyLossRegistry.register(name, SkyRLLoss(resolve(objective, settings)))


for _name in presets_for(reasons_against):
    register(f"dppo_megatron.{_name}", _name)
