"""What an objective is called with, checked once and cleaned of what must never enter the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .settings import ObjectiveError, ObjectiveSettings

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class TopKLogprobs:
    """Log-probs of the tokens the rollout policy found most likely, under both policies.

    ids                  [T, K] int32/int64, global token ids of TopK(mu, K); -1 = absent. No id twice, except
                         that the sampled token may or may not be among them.
    rollout_logprob      [T, K] fp32/fp64, ln mu. Ignored where absent.
    logprob              [T, K] fp32/fp64, ln pi. Ignored where absent. Carries a gradient when the method
                         needs one.
    other_logprob        [T] ln of pi's mass outside TopK united with the sampled token, from the kernel.
    target_ids           [T] int, the sampled token.
    vocab_size           tokens of the whole vocabulary, or [T] of the set that each was drawn from, for the uniform
                         tail of the predictive direction and for score centering with a region in probabilities.
    old_logprob          [T, K] as rollout_logprob, of the old policy (PPO's); for anchor 'old' only.
    old_other_logprob    [T] as other_logprob, of the same policy; None = what its top K leave of 1.
    """

    ids: Int[Tensor, "T K"]
    rollout_logprob: Float[Tensor, "T K"]
    logprob: Float[Tensor, "T K"]
    other_logprob: Float[Tensor, " T"]
    target_ids: Int[Tensor, " T"]
    vocab_size: int | Int[Tensor, " T"] | None = None
    old_logprob: Float[Tensor, "T K"] | None = None
    old_other_logprob: Float[Tensor, " T"] | None = None


@dataclass(frozen=True)
class Buckets:
    """S = TopK(mu, K) united with the sampled token: [T, K + 1] columns, the last one the sampled token.

    Absent columns, and copies of the sampled token among the top K, have `present` False and probability 0 under both.
    `*_other` is the mass of everything else; anchor_other is 0 where it is below the rounding of its own sum.
    """

    present: Bool[Tensor, "T K+1"]
    anchor_logprob: Float[Tensor, "T K+1"]
    policy_logprob: Float[Tensor, "T K+1"]  # carries the gradient of TopKLogprobs.logprob
    anchor_other: Float[Tensor, " T"]
    anchor_other_logprob: Float[Tensor, " T"]
    policy_other_logprob: Float[Tensor, " T"]
    sampled_in_topk: Bool[Tensor, " T"]
    vocab_size: int | Int[Tensor, " T"] | None

    @property
    def anchor(self) -> Float[Tensor, "T K+1"]:
        return self.anchor_logprob.exp() * self.present

    @property
    def policy(self) -> Float[Tensor, "T K+1"]:
        return self.policy_logprob.exp() * self.present


@dataclass(frozen=True)
class Tokens:
    """The [T] inputs with neutral values where `mask` is False, so that garbage there can reach nothing."""

    mask: Bool[Tensor, " T"]
    logprob: Float[Tensor, " T"]  # ln pi(a), with gradient
    detached_logprob: Float[Tensor, " T"]  # the same without
    rollout_logprob: Float[Tensor, " T"] | None
    old_logprob: Float[Tensor, " T"] | None
    reference_logprob: Float[Tensor, " T"] | None
    advantage: Float[Tensor, " T"]
    entropy: Float[Tensor, " T"] | None  # with gradient when it has one
    sequence_ids: Int[Tensor, " T"] | None
    positions: Int[Tensor, " T"] | None = None  # order within a sequence; None = as given

    @property
    def zeros(self) -> Float[Tensor, " T"]:
        return torch.zeros_like(self.detached_logprob)


def check_and_clean(
    settings: ObjectiveSettings,
    name: str,
    *,
    logprob: Tensor,
    mask: Tensor,
    rollout_logprob: Tensor | None,
    old_logprob: Tensor | None,
    reference_logprob: Tensor | None,
    advantage: Tensor | None,
    entropy: Tensor | None,
    sequence_ids: Tensor | None,
    positions: Tensor | None = None,
) -> Tokens:
    """Refuse inputs that are missing, misshapen or too coarse; neutralise positions outside the mask."""
    if logprob.ndim != 1:
        raise ObjectiveError(f"{name}: logprob must be [T], got shape {tuple(logprob.shape)}")
    required = {
        "advantage": (advantage, not settings.supervised),
        "rollout_logprob": (rollout_logprob, needs_rollout(settings)),
        "old_logprob": (old_logprob, needs_old(settings)),
        "sequence_ids": (sequence_ids, needs_sequences(settings)),
        "reference_logprob": (reference_logprob, settings.reference_kl != "none"),
        "entropy": (entropy, settings.entropy_coefficient > 0),
    }
    missing = [key for key, (value, needed) in required.items() if needed and value is None]
    if missing:
        raise ObjectiveError(f"{name} needs {', '.join(missing)}")
    fields = {
        "mask": mask,
        "rollout_logprob": rollout_logprob,
        "old_logprob": old_logprob,
        "reference_logprob": reference_logprob,
        "advantage": advantage,
        "entropy": entropy,
        "sequence_ids": sequence_ids,
        "positions": positions,
    }
    for key, value in fields.items():
        if value is not None and value.shape != logprob.shape:
            raise ObjectiveError(f"{name}: {key} has shape {tuple(value.shape)}, logprob has {tuple(logprob.shape)}")
    for key, value in {"logprob": logprob, **fields}.items():
        if value is not None and key.endswith("logprob"):
            _refuse_coarse(name, key, value)
    # On a GPU this check would wait for the device.
    if rollout_logprob is not None and rollout_logprob.is_cpu and ((rollout_logprob > 1e-3) & (mask != 0)).any():
        raise ObjectiveError(f"{name}: rollout_logprob has values above 0; pass natural log-probs, not probabilities")

    keep = mask != 0
    dtype = logprob.dtype

    def clean(value: Tensor | None, neutral: float = 0.0) -> Tensor | None:
        if value is None:
            return None
        return torch.where(keep, value, torch.full_like(value, neutral)).to(dtype)

    current = clean(logprob)
    return Tokens(
        mask=keep,
        logprob=current,
        detached_logprob=current.detach(),
        rollout_logprob=_no_gradient(clean(rollout_logprob)),
        old_logprob=_no_gradient(clean(old_logprob)),
        reference_logprob=_no_gradient(clean(reference_logprob)),
        advantage=keep.to(dtype) if settings.supervised else clean(advantage).detach(),
        entropy=clean(entropy),
        sequence_ids=None if sequence_ids is None else torch.where(keep, sequence_ids, 0).long(),
        positions=positions,
    )


def make_buckets(settings: ObjectiveSettings, name: str, tokens: Tokens, topk: TopKLogprobs) -> Buckets:
    """The top K and the sampled token as disjoint columns, under pi and under the anchor that the settings name."""
    if topk.ids.ndim != 2 or topk.ids.shape[0] != tokens.mask.shape[0]:
        raise ObjectiveError(
            f"{name}: topk.ids has shape {tuple(topk.ids.shape)}, expected [{tokens.mask.shape[0]}, K]"
        )
    old = settings.anchor == "old"
    if old and topk.old_logprob is None:
        raise ObjectiveError(f"{name} with anchor='old' needs topk.old_logprob")
    anchor_list = topk.old_logprob if old else topk.rollout_logprob
    anchor_sampled = tokens.old_logprob if old else tokens.rollout_logprob
    for key, value in (("logprob", topk.logprob), ("rollout_logprob", anchor_list)):
        if value.shape != topk.ids.shape:
            raise ObjectiveError(
                f"{name}: topk.{key} has shape {tuple(value.shape)}, topk.ids has {tuple(topk.ids.shape)}"
            )
        _refuse_coarse(name, f"topk.{key}", value)
    for key, value in (("other_logprob", topk.other_logprob), ("target_ids", topk.target_ids)):
        if value.shape != tokens.mask.shape:
            raise ObjectiveError(f"{name}: topk.{key} has shape {tuple(value.shape)}, expected [T]")

    dtype, keep = tokens.detached_logprob.dtype, tokens.mask[:, None]
    is_target = topk.ids == topk.target_ids[:, None]
    # The sampled token has its own column, taken from the [T] log-probs, whether or not it is in the top K.
    in_topk = keep & (topk.ids >= 0) & ~is_target
    present = torch.cat([in_topk, keep], dim=1)

    def columns(values: Tensor, sampled: Tensor) -> Tensor:
        values = torch.where(in_topk, values, torch.zeros_like(values)).to(dtype)
        return torch.cat([values, sampled[:, None]], dim=1)

    anchor = columns(anchor_list, anchor_sampled).detach()
    # Each probability carries the rounding of the coarser of the two sources it came from.
    eps = max(torch.finfo(anchor_list.dtype).eps, torch.finfo(dtype).eps)
    noise = 4 * eps * present.shape[1]
    remainder = 1 - (anchor.exp() * present).sum(dim=1)
    anchor_other = torch.where(remainder > noise, remainder, torch.zeros_like(remainder))
    if old and topk.old_other_logprob is not None:
        anchor_other = topk.old_other_logprob.detach().to(dtype).exp()
    # Where the list is all there is, what the anchor's probabilities lack of 1 is rounding, however much.
    anchor_other = torch.where(topk.other_logprob.detach() == float("-inf"), 0.0, anchor_other)
    return Buckets(
        present=present,
        anchor_logprob=anchor,
        policy_logprob=columns(topk.logprob, tokens.logprob),
        anchor_other=torch.where(tokens.mask, anchor_other, torch.zeros_like(anchor_other)),
        anchor_other_logprob=torch.where(anchor_other > 0, anchor_other, 1.0).log(),
        policy_other_logprob=torch.where(tokens.mask, topk.other_logprob.detach().to(dtype), 0.0),
        sampled_in_topk=(is_target & (topk.ids >= 0)).any(dim=1),
        vocab_size=topk.vocab_size,
    )


def needs_rollout(settings: ObjectiveSettings) -> bool:
    if settings.supervised:
        return False
    corrects = settings.mismatch != "none" or settings.rejection != "none" or settings.drops_outliers
    compares = settings.response_region != "none" or settings.rollout_kl != "none" or settings.batch_statistic != "none"
    used = settings.importance == "rollout" or corrects or compares or settings.reads_topk
    return used or (settings.has_region and settings.anchor == "rollout")


def needs_old(settings: ObjectiveSettings) -> bool:
    anchored = settings.has_region and settings.anchor == "old"
    return settings.importance == "old" or anchored or settings.batch_statistic != "none"


def needs_sequences(settings: ObjectiveSettings) -> bool:
    weighs = settings.mismatch != "none" and settings.mismatch_level != "token"
    drops = settings.rejection != "none" or settings.drops_outliers or settings.response_region != "none"
    return settings.ratio_level != "token" or weighs or drops or needs_positions(settings)


def needs_positions(settings: ObjectiveSettings) -> bool:
    """True when the order of the tokens within a sequence matters."""
    placed = settings.position_weight is not None or settings.prefix_budget is not None
    return placed or settings.ratio_level == "prefix_minimum"


def _refuse_coarse(name: str, key: str, value: Tensor) -> None:
    if value.dtype not in (torch.float32, torch.float64):
        raise ObjectiveError(
            f"{name}: {key} is {value.dtype}; log-probs must be float32 or float64. Rounded to 16 bits they "
            "give a token up to 3e-2 of spurious divergence and the tail a negative mass"
        )


def _no_gradient(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach()
