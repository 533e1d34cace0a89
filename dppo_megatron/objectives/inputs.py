"""Check an objective's inputs once, and neutralize values that must not affect the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .contract import ObjectiveProtocol, TopKLogprobs
from .settings import ObjectiveError, nearest

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class Buckets:
    """Contains S = TopK(mu, K) united with the sampled token: [T, K + 1] columns, the sampled token last.

    Absent columns, and copies of the sampled token among the top K, have `present` False and probability 0 under both
    policies. `*_other` is the mass of all other tokens; anchor_other is 0 where the mass is below the rounding of 1 -
    sum(anchor). Example: the ids [[3, 7, -1]] and the sampled token 7 have present [[True, False, False, True]].
    """

    present: Bool[Tensor, "T K+1"]
    anchor_logprob: Float[Tensor, "T K+1"]
    policy_logprob: Float[Tensor, "T K+1"]  # carries the gradient of TopKLogprobs.logprob
    anchor_other: Float[Tensor, " T"]
    anchor_other_logprob: Float[Tensor, " T"]
    policy_other_logprob: Float[Tensor, " T"]
    sampled_in_topk: Bool[Tensor, " T"]
    vocab_size: int | Int[Tensor, " T"] | None
    noise: float  # rounding of the anchor's summed probabilities

    @property
    def anchor(self) -> Float[Tensor, "T K+1"]:
        return self.anchor_logprob.exp() * self.present

    @property
    def policy(self) -> Float[Tensor, "T K+1"]:
        return self.policy_logprob.exp() * self.present


@dataclass(frozen=True)
class Tokens:
    """Contains the [T] inputs, with neutral values where `mask` is False, so that these tokens have no effect."""

    mask: Bool[Tensor, " T"]
    logprob: Float[Tensor, " T"]  # ln pi(a), with gradient
    detached_logprob: Float[Tensor, " T"]  # ln pi(a), without gradient
    advantage: Float[Tensor, " T"]
    rollout_logprob: Float[Tensor, " T"] | None = None
    old_logprob: Float[Tensor, " T"] | None = None
    reference_logprob: Float[Tensor, " T"] | None = None
    teacher_logprob: Float[Tensor, " T"] | None = None
    entropy: Float[Tensor, " T"] | None = None  # with gradient, if the input has a gradient
    sequence_ids: Int[Tensor, " T"] | None = None
    positions: Int[Tensor, " T"] | None = None  # order within a sequence; None = the token order

    @property
    def zeros(self) -> Float[Tensor, " T"]:
        return torch.zeros_like(self.detached_logprob)


def check_and_clean(objective: ObjectiveProtocol, **tensors: Tensor | None) -> Tokens:
    """Reject inputs that are missing, unknown, misshapen or too coarse; set neutral values outside the mask.

    If the mask is not boolean, its values are read, and the host waits for them.
    tensors: the inputs of an objective's call by name, without `topk` and `teacher`.
    """
    name, supervised = objective.name, objective.settings.supervised
    required = {
        "logprob": True,
        "mask": True,
        "advantage": not supervised,
        "rollout_logprob": objective.needs_rollout,
        "old_logprob": objective.needs_old,
        "sequence_ids": objective.needs_sequences,
        "reference_logprob": objective.needs_reference,
        "teacher_logprob": objective.needs_teacher,
        "entropy": objective.needs_entropy,
    }
    inputs = [key for key, needed in required.items() if needed]
    if unknown := [key for key in tensors if key not in required and key != "positions"]:
        meant = ", ".join(f"unknown input {key!r}: {nearest(key, inputs).rstrip('?')}" for key in unknown)
        raise ObjectiveError(f"{name}: {meant}; needs, by name and each [T]: {', '.join(inputs)}")
    present = {key: value for key, value in tensors.items() if value is not None}
    if missing := [key for key in inputs if key not in present]:
        raise ObjectiveError(f"{name} needs {', '.join(missing)}; pass by name, each [T]: {', '.join(inputs)}")
    for key, value in present.items():
        if not isinstance(value, Tensor):
            raise ObjectiveError(f"{name}: {key} is a {type(value).__name__}; pass a tensor [T]")
    logprob, mask = present.pop("logprob"), present.pop("mask")
    if logprob.ndim != 1:
        raise ObjectiveError(f"{name}: logprob must be [T], got shape {tuple(logprob.shape)}")
    for key, value in {"mask": mask, **present}.items():
        if (value.shape, value.device) != (logprob.shape, logprob.device):
            theirs = f"{tuple(logprob.shape)} on {logprob.device}"
            raise ObjectiveError(
                f"{name}: {key} has shape {tuple(value.shape)} on {value.device}, logprob has {theirs}"
            )
    for key, value in {"logprob": logprob, **present}.items():
        if key.endswith("logprob"):
            _reject_coarse(name, key, value)

    keep = mask != 0
    if mask.dtype != torch.bool and bool((keep & (mask != 1)).any()):
        raise ObjectiveError(f"{name}: mask has values other than 0 and 1; multiply the loss by weights of tokens")
    order = {key: present.pop(key) for key in ("sequence_ids", "positions") if key in present}
    if "sequence_ids" in order:
        order["sequence_ids"] = torch.where(keep, order["sequence_ids"], 0).long()
    values = {"logprob": logprob, **present}
    clean = {key: torch.where(keep, x, torch.zeros_like(x)).to(logprob.dtype) for key, x in values.items()}
    if supervised:
        clean["advantage"] = keep.to(logprob.dtype)
    fixed = {key: x if key in ("logprob", "entropy") else x.detach() for key, x in clean.items()}
    return Tokens(mask=keep, detached_logprob=clean["logprob"].detach(), **fixed, **order)


def make_buckets(objective: ObjectiveProtocol, tokens: Tokens, topk: TopKLogprobs, is_teacher: bool = False) -> Buckets:
    """Return the top K and the sampled token as disjoint columns, under pi and the configured anchor.

    is_teacher: whether the anchor is the teacher. `policy_other_logprob` then carries a gradient too.
    """
    name = objective.name
    if topk.ids.ndim != 2 or topk.ids.shape[0] != tokens.mask.shape[0]:
        raise ObjectiveError(
            f"{name}: topk.ids has shape {tuple(topk.ids.shape)}, expected [{tokens.mask.shape[0]}, K]"
        )
    old = objective.settings.anchor == "old" and not is_teacher
    if old and topk.old_logprob is None:
        raise ObjectiveError(f"{name} with anchor='old' needs topk.old_logprob")
    anchor_list = topk.old_logprob if old else topk.rollout_logprob
    anchor_sampled = tokens.old_logprob if old else tokens.teacher_logprob if is_teacher else tokens.rollout_logprob
    other = topk.other_logprob if is_teacher else topk.other_logprob.detach()
    for key, value in (("logprob", topk.logprob), ("rollout_logprob", anchor_list)):
        if value.shape != topk.ids.shape:
            raise ObjectiveError(
                f"{name}: topk.{key} has shape {tuple(value.shape)}, topk.ids has {tuple(topk.ids.shape)}"
            )
        _reject_coarse(name, f"topk.{key}", value)
    for key, value in (("other_logprob", topk.other_logprob), ("target_ids", topk.target_ids)):
        if value.shape != tokens.mask.shape:
            raise ObjectiveError(f"{name}: topk.{key} has shape {tuple(value.shape)}, expected [T]")

    dtype, keep = tokens.detached_logprob.dtype, tokens.mask[:, None]
    is_target = topk.ids == topk.target_ids[:, None]
    # The sampled token has a separate column, from the [T] log-probs, even if it is in the top K.
    in_topk = keep & (topk.ids >= 0) & ~is_target
    present = torch.cat([in_topk, keep], dim=1)

    def columns(values: Tensor, sampled: Tensor) -> Tensor:
        values = torch.where(in_topk, values, torch.zeros_like(values)).to(dtype)
        return torch.cat([values, sampled[:, None]], dim=1)

    anchor = columns(anchor_list, anchor_sampled).detach()
    # Probabilities are rounded as in the coarser dtype, the list's or the tokens'.
    eps = max(torch.finfo(anchor_list.dtype).eps, torch.finfo(dtype).eps)
    noise = 4 * eps * present.shape[1]
    remainder = 1 - (anchor.exp() * present).sum(dim=1)
    anchor_other = torch.where(remainder > noise, remainder, torch.zeros_like(remainder))
    if old and topk.old_other_logprob is not None:
        anchor_other = topk.old_other_logprob.detach().to(dtype).exp()
    # If the list covers all mass, any difference of the anchor's sum from 1 is rounding.
    anchor_other = torch.where(other.detach() == float("-inf"), 0.0, anchor_other)
    return Buckets(
        present=present,
        anchor_logprob=anchor,
        policy_logprob=columns(topk.logprob, tokens.logprob),
        anchor_other=torch.where(tokens.mask, anchor_other, torch.zeros_like(anchor_other)),
        anchor_other_logprob=torch.where(anchor_other > 0, anchor_other, 1.0).log(),
        policy_other_logprob=torch.where(tokens.mask, other.to(dtype), 0.0),
        sampled_in_topk=(is_target & (topk.ids >= 0)).any(dim=1),
        vocab_size=topk.vocab_size,
        noise=noise,
    )


def _reject_coarse(name: str, key: str, value: Tensor) -> None:
    if value.dtype not in (torch.float32, torch.float64):
        raise ObjectiveError(
            f"{name}: {key} is {value.dtype}; log-probs must be float32 or float64. Rounded to 16 bits they "
            "give a token up to 3e-2 of spurious divergence and the tail a negative mass"
        )
