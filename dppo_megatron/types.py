"""The nouns that flow from prompt to gradient. Plain frozen dataclasses; arrays are numpy until the trainer packs them.

`P` prompt tokens, `S` tokens after the prompt, `R` of them sampled by the policy (all, but for `Rollout.spans`), `K`
top-K ids, `n` samples of one prompt, `T` packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt at its position in the run's prompt order.

    `position` counts prompts from the start of the run and never repeats (an epoch visits every row once), so it
    names the prompt across crashes: what the bank holds by position is done, everything else is still to sample.
    """

    position: int
    row: int  # line of the source file, from 0
    token_ids: np.ndarray  # [P] int32
    text: str
    answer: str
    columns: dict[str, Any] = field(default_factory=dict)  # the source row, for user rewards
    source: str = ""  # data source of the row, which chooses its rewards


POLICY, ENVIRONMENT, INHERITED = range(3)  # of a span: sampled here, put in from outside, sampled in an earlier branch


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled response with what the engine reported of every token, at the sampling temperature.

    With several turns it is one branch of a trajectory: a token sequence whose spans say what the policy sampled.
    """

    token_ids: np.ndarray  # [S] int32, the end-of-sequence token included
    rollout_logprob: np.ndarray  # [R] fp32, ln mu of the processed distribution the token was drawn from
    versions: np.ndarray  # [R] int32, policy version that sampled the token
    finish_reason: str  # "stop" | "length" | "max_turns" | "abort"
    topk_ids: np.ndarray | None = None  # [R, K] int32, -1 = absent
    rollout_topk_logprob: np.ndarray | None = None  # [R, K] fp32
    # [P + S - 1, L, k] uint8 or uint16: the k experts of each of the L MoE layers, for every token the engine read
    # (all but the last one), in the engine's order of preference. For routing replay.
    routed_experts: np.ndarray | None = None
    # [J, 3] int32: origin (POLICY, ENVIRONMENT, INHERITED), tokens, turn. None: one span, all of it sampled here.
    spans: np.ndarray | None = None
    # The tokens that top-p, top-k and min-p left to draw from, the sampled one included; rollout_logprob is over them.
    kept_ids: np.ndarray | None = None  # [sum of kept_counts] int32
    kept_counts: np.ndarray | None = None  # [R] int32
    # Number in its group, from 0; samples of one trajectory are its branches, in order. None: a trajectory of its own.
    trajectory: int | None = None


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All samples of one prompt with their rewards: the unit of the bank and of the group baseline."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]  # n of them
    rewards: np.ndarray  # [n] fp32, of the sample's trajectory
    reward_failed: np.ndarray  # [n] bool: the verifier raised or timed out; the sample carries no loss
    temperature: float
    turn_rewards: tuple[np.ndarray, ...] | None = None  # fp32 [turns] of each trajectory

    @property
    def num_tokens(self) -> int:
        return sum(len(self.prompt.token_ids) + len(r.token_ids) for r in self.rollouts)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One packed micro-batch: sequences end to end, no padding (Megatron's THD).

    Row t predicts `target_ids[t]`, the token that follows it in its own sequence. Per-token fields belong to the
    target; `mask` is True where the target carries loss. `loss_weight` holds the share of this token in the global
    batch's loss, fixed before the first micro-batch, so the loss is `sum(loss_weight * loss)` however it is split.
    """

    token_ids: torch.Tensor  # [T] int64
    position_ids: torch.Tensor  # [T] int64
    cu_seqlens: torch.Tensor  # [B + 1] int32
    target_ids: torch.Tensor  # [T] int64, 0 where mask is False
    mask: torch.Tensor  # [T] bool
    loss_weight: torch.Tensor  # [T] fp32, 0 where mask is False
    advantage: torch.Tensor | None = None  # [T] fp32
    rollout_logprob: torch.Tensor | None = None  # [T] fp32, ln mu, as the engine reported it
    temperature: torch.Tensor | None = None  # [T] fp32; None = 1
    topk_ids: torch.Tensor | None = None  # [T, K] int32, -1 = absent
    rollout_topk_logprob: torch.Tensor | None = None  # [T, K] fp32
    # Sampling masks: what top-p, top-k and min-p left to draw each target from, end to end; None = everything.
    kept_ids: torch.Tensor | None = None  # [sum of kept_counts] int32
    kept_counts: torch.Tensor | None = None  # [T] int32, 0 where mask is False
    # Computed by the trainer before the step's first update, where the objective needs it.
    old_logprob: torch.Tensor | None = None  # [T] fp32, by the weights the step starts from
    old_topk_logprob: torch.Tensor | None = None  # [T, K] fp32, of topk_ids by the same weights
    old_other_logprob: torch.Tensor | None = None  # [T] fp32, of all tokens but topk_ids and the target
    reference_logprob: torch.Tensor | None = None  # [T] fp32, by the run's start model
    # Computed once where possible: the first so many tokens of a sequence are those of the sequence before it.
    shared_prefix: torch.Tensor | None = None  # [B] int32, 0 = none; the same of all sequences with one beginning
    # Routing replay: the experts of each MoE layer that read token_ids[t], -1 where the trainer chooses itself.
    routed_experts: torch.Tensor | None = None  # [T, L, k] int16
