"""Register the objectives as verl 0.9 policy losses, and log-probs for its Megatron engine. docs/integrations.md.

Importing this module registers every preset for which verl supplies the inputs, as `dppo_megatron.NAME`:

    VERL_USE_EXTERNAL_MODULES=dppo_megatron.integrations.verl  # in the environment of every process
    actor_rollout_ref.actor.policy_loss.loss_mode=dppo_megatron.dppo_binary_tv
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, agg_loss, register_policy_loss

from dppo_megatron.objectives import ObjectiveProtocol
from dppo_megatron.vocab_parallel import token_statistics

from .padded import averaged, on_rows, presets_for, refuse_unfit, resolve, unfit


class VerlLoss:
    """Implements a policy loss as verl calls it.

    `old_log_prob` is both mu and the anchor. With `algorithm.rollout_correction.bypass_mode` and verl's V1 trainer it
    comes from the rollout policy, otherwise from the policy that verl recomputed. The objective defines the thresholds:
    `clip_ratio` and similar settings have no effect. Raises ObjectiveError for an objective that needs an input that
    verl does not supply.
    """

    def __init__(self, objective: ObjectiveProtocol):
        refuse_unfit(objective, "verl", unfit(objective))
        self.objective = objective

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss, aggregated by verl as configured, and `actor/...` metrics. Inputs [B, T], log-probs fp32."""
        out = on_rows(
            self.objective,
            mask=response_mask,
            logprob=log_prob,
            rollout_logprob=old_log_prob,
            advantage=advantages,
        )
        losses = out.loss.view_as(log_prob)
        if rollout_is_weights is not None:
            losses = losses * rollout_is_weights
        loss = agg_loss(
            loss_mat=losses,
            loss_mask=response_mask,
            loss_agg_mode=loss_agg_mode,
            **({} if config is None else config.global_batch_info),
        )
        return loss, {f"actor/{name}": value for name, value in averaged(out).items()}


def register(name: str, objective: str | ObjectiveProtocol, **settings: Any) -> None:
    """Register an objective, or a preset with any axis overridden, as verl's loss mode `name`.

    Call this function in a module that VERL_USE_EXTERNAL_MODULES names. Raises ObjectiveError as `VerlLoss` does, and
    ValueError if the name is taken.
    """
    if name in POLICY_LOSS_REGISTRY:
        raise ValueError(f"verl has a policy loss {name!r} already: choose another name")
    register_policy_loss(name)(VerlLoss(resolve(objective, settings)))


def use_token_statistics() -> None:
    """Let verl's Megatron engine take log-probs and entropy from `vocab_parallel`: one collective, logits not cloned.

    This replaces the language-model engine's method. Calls that also ask for distillation or sums of squared
    probabilities still go to verl's method. Raises ImportError if verl's Megatron engine cannot be imported. Call this
    function once in every trainer process, e.g. in the module that VERL_USE_EXTERNAL_MODULES names.
    """
    from megatron.core import parallel_state
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead as Engine

    theirs = Engine._lm_head_logits_processor

    def ours(
        self: Any,
        logits: Tensor,  # [1, tokens, V_local], consumed
        label: Tensor,  # [1, tokens]
        temperature: Tensor,  # [1, tokens]; verl pads with 0
        **flags: Any,
    ) -> dict[str, Tensor]:
        if flags["calculate_sum_pi_squared"] or flags["distillation_use_topk"] or flags["distillation_only"]:
            return theirs(self, logits, label, temperature, **flags)
        statistics = token_statistics(
            logits.flatten(0, 1),
            label.flatten(),
            temperature=temperature.clamp(min=1e-8).expand_as(label).flatten(),
            group=parallel_state.get_tensor_model_parallel_group(),
            entropy="differentiable" if flags["calculate_entropy"] else "none",
        )
        outputs = {"log_probs": statistics.logprob.view_as(label)}
        if flags["calculate_entropy"]:
            outputs["entropy"] = statistics.entropy.view_as(label)
        return outputs

    Engine._lm_head_logits_processor = ours


for _name in presets_for(unfit):
    register(f"dppo_megatron.{_name}", _name)
