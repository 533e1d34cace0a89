"""Compute the token metrics of an objective's call, under the names that the log uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import divergence as measure
from .centering import Centering
from .inputs import Buckets, Tokens
from .metrics import Metric, effective_size_metric, max_metric, mean_metric, min_metric, quantiles_metric, sum_metric
from .settings import ObjectiveSettings
from .trust_region import logprob_of


@dataclass(frozen=True)
class TokenResults:
    """Contains intermediate results of an objective's call, all [T] and without gradient."""

    loss: Tensor
    weight: Tensor
    ratio: Tensor | None  # r before cap and floor
    used_ratio: Tensor | None  # r after cap and floor
    divergence: Tensor  # D
    outside: Tensor  # True if the control masks, clips or penalizes the token, or a response region or budget drops it
    exceeds: Tensor  # True if D is above the threshold, for any A and direction
    dropped: Tensor  # True if mismatch or rejection drops the token
    correction: Tensor  # factor of A r for mismatch
    centering: Centering | None
    reference_kl: Tensor | None


@torch.no_grad()
def token_metrics(
    s: ObjectiveSettings, tokens: Tokens, buckets: Buckets | None, results: TokenResults
) -> dict[str, Metric]:
    """Return the metrics of one call. Settings and the given inputs, not their values, determine which metrics exist.

    Metrics cover all tokens that carry loss. Only `policy/masked_share`, `weight`, `ratio/capped_share`,
    `centering/size` and `topk/binary_disagreement` are restricted to tokens with A != 0, which have a gradient to lose.
    `..._positive` covers tokens with A > 0, and `..._negative` tokens with A < 0.
    """
    mask = tokens.mask
    positive, negative = mask & (tokens.advantage > 0), mask & (tokens.advantage < 0)
    signed = positive | negative  # A = 0 has no gradient to mask

    def by_sign(name: str, value: Tensor) -> dict[str, Metric]:
        return {f"{name}_positive": mean_metric(value, positive), f"{name}_negative": mean_metric(value, negative)}

    metrics = {
        "train/tokens": sum_metric(mask, mask),
        "train/nonfinite_tokens": sum_metric(~results.loss.isfinite(), mask),
        "loss/token_mean": mean_metric(results.loss, mask),
    }
    if tokens.entropy is not None:
        metrics["train/entropy"] = mean_metric(tokens.entropy, mask)
    if results.reference_kl is not None:
        metrics["train/reference_kl"] = mean_metric(results.reference_kl, mask)
    if s.supervised:
        return metrics

    if tokens.entropy is not None:
        metrics |= by_sign("train/entropy", tokens.entropy)
    metrics |= {
        "advantage/zero_share": mean_metric(tokens.advantage == 0, mask),
        "weight/mean": mean_metric(results.weight, signed),
        "weight/min": min_metric(results.weight, signed),
        "weight/max": max_metric(results.weight, signed),
    }
    if s.has_region or s.response_region != "none" or s.batch_statistic.startswith("second_moment"):
        metrics |= {"policy/masked_share": mean_metric(results.outside, signed)}
        metrics |= by_sign("policy/masked_share", results.outside)
    if s.has_region:
        metrics |= {"policy/outside_share": mean_metric(results.exceeds, mask)}
        metrics |= by_sign("policy/outside_share", results.exceeds)
    if s.mismatch != "none" or s.rejection != "none" or s.drops_outliers:
        metrics["correction/dropped_share"] = mean_metric(results.dropped, mask)
    if s.mismatch == "truncate":
        metrics["correction/capped_share"] = mean_metric(results.correction >= s.mismatch_high, mask)
        metrics["correction/weight_mean"] = mean_metric(results.correction, mask)
    if results.centering is not None:
        metrics |= {
            "centering/mass_rollout": mean_metric(results.centering.anchor_mass, mask),
            "centering/mass_policy": mean_metric(results.centering.mass, mask),
            "centering/size": mean_metric(results.centering.size, signed),
        }
    if results.ratio is not None:
        metrics |= {
            "ratio/mean": mean_metric(results.ratio, mask),
            "policy/ratio_min": min_metric(results.ratio, mask),
            "policy/ratio_max": max_metric(results.ratio, mask),
            "ratio/effective_sample_size": effective_size_metric(results.used_ratio, mask),
        }
        if s.truncates:
            metrics["ratio/capped_share"] = mean_metric(results.used_ratio != results.ratio, signed)
    if tokens.rollout_logprob is not None:
        k3 = measure.token_divergence("k3", tokens.rollout_logprob, tokens.detached_logprob, None)
        metrics |= {"mismatch/kl": mean_metric(k3, mask), **by_sign("mismatch/kl", k3)}
        metrics |= _mismatch("mismatch", tokens.rollout_logprob, tokens.detached_logprob, mask)
        if tokens.old_logprob is not None:
            k3 = measure.token_divergence("k3", tokens.rollout_logprob, tokens.old_logprob, None)
            metrics["mismatch_recomputed/k3"] = mean_metric(k3, mask)
            metrics |= _mismatch("mismatch_recomputed", tokens.rollout_logprob, tokens.old_logprob, mask)
    if logprob_of(s.anchor, tokens) is not None:
        metrics |= {
            "policy/divergence_mean": mean_metric(results.divergence, mask),
            "policy/divergence_max": max_metric(results.divergence, mask),
            "divergence": quantiles_metric(results.divergence, mask),
            **by_sign("policy/divergence", results.divergence),
        }
    if buckets is not None:
        metrics |= _topk(s, tokens, buckets, signed)
    return metrics


def _mismatch(name: str, engine: Tensor, trainer: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Return the differences between engine and trainer for the engine's samples, in probability and in nats.

    k1: an unbiased estimate of KL(engine || trainer), which may be negative. k3 (`mismatch/kl`) cannot be negative.
    total_variation: E |r - 1| / 2, an unbiased estimate of TV(engine, trainer) over the whole vocabulary.
    """
    log_ratio = trainer - engine
    shift = trainer.exp() - engine.exp()
    return {
        f"{name}/k1": mean_metric(-log_ratio, mask),
        f"{name}/total_variation": mean_metric(torch.expm1(log_ratio).abs() / 2, mask),
        f"{name}/shift_mean": mean_metric(shift.abs(), mask),
        f"{name}/shift_max": max_metric(shift.abs(), mask),
        f"{name}/max_abs_logprob_difference": max_metric(log_ratio.abs(), mask),
    }


def _topk(s: ObjectiveSettings, tokens: Tokens, buckets: Buckets, signed: Tensor) -> dict[str, Metric]:
    mask, ln_mu = tokens.mask, logprob_of(s.anchor, tokens)
    binary_tv, topk_tv = measure.binary_tv(ln_mu, tokens.detached_logprob), measure.topk_tv(buckets)
    metrics = {
        "topk/tail_mass_rollout": mean_metric(buckets.anchor_other, mask),
        "topk/tail_mass_policy": mean_metric(buckets.policy_other_logprob.exp(), mask),
        "topk/sampled_outside_share": mean_metric(~buckets.sampled_in_topk, mask),
        "topk/binary_tv_mean": mean_metric(binary_tv, mask),
        "topk/topk_tv_mean": mean_metric(topk_tv, mask),
    }
    if s.delta is not None:
        binary, topk = binary_tv, topk_tv
        if s.divergence.endswith("kl"):
            binary, topk = measure.binary_kl(ln_mu, tokens.detached_logprob), measure.topk_kl(buckets)
        metrics["topk/binary_disagreement"] = mean_metric((binary > s.delta) != (topk > s.delta), signed)
    return metrics
