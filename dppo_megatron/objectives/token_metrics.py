"""What one call of an objective reports about its tokens."""

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
class Step:
    """What the objective worked out on its way, all [T] and without gradient."""

    loss: Tensor
    weight: Tensor
    ratio: Tensor | None  # r before cap and floor
    used_ratio: Tensor | None  # after
    divergence: Tensor  # D
    outside: Tensor  # masked, clipped or penalised by the control, or dropped with its response
    beyond: Tensor  # D above its threshold, whatever A is and wherever the token moves
    dropped: Tensor  # by mismatch or rejection
    correction: Tensor  # what mismatch multiplies A r with
    centering: Centering | None
    reference_kl: Tensor | None


@torch.no_grad()
def token_metrics(s: ObjectiveSettings, tokens: Tokens, buckets: Buckets | None, step: Step) -> dict[str, Metric]:
    """Metrics of one call. Which ones exist depends on settings and inputs given, not on values.

    Of all tokens that carry loss, but for `masked`, `weight` and `capped_share`: of those with A != 0, which alone have
    a gradient to lose. `/positive`, `/negative` and names that end so: of A > 0, of A < 0.
    """
    mask = tokens.mask
    metrics = {
        "tokens": sum_metric(mask, mask),
        "nonfinite_tokens": sum_metric(~step.loss.isfinite(), mask),
        "loss/token_mean": mean_metric(step.loss, mask),
    }
    if tokens.entropy is not None:
        metrics["entropy"] = mean_metric(tokens.entropy, mask)
    if step.reference_kl is not None:
        metrics["reference_kl"] = mean_metric(step.reference_kl, mask)
    if s.supervised:
        return metrics

    positive, negative = mask & (tokens.advantage > 0), mask & (tokens.advantage < 0)
    signed = positive | negative  # A = 0 has no gradient to mask
    if tokens.entropy is not None:
        metrics |= _by_sign("entropy/", tokens.entropy, positive, negative)
    metrics |= {
        "advantage/zero_share": mean_metric(tokens.advantage == 0, mask),
        "weight/mean": mean_metric(step.weight, signed),
        "weight/min": min_metric(step.weight, signed),
        "weight/max": max_metric(step.weight, signed),
    }
    if s.has_region or s.response_region != "none" or s.batch_statistic.startswith("second_moment"):
        metrics |= {
            "masked/share": mean_metric(step.outside, signed),
            "masked/positive": mean_metric(step.outside, positive),
            "masked/negative": mean_metric(step.outside, negative),
        }
    if s.has_region:
        metrics["outside/share"] = mean_metric(step.beyond, mask)
        metrics |= _by_sign("outside/", step.beyond, positive, negative)
    if s.mismatch != "none" or s.rejection != "none" or s.drops_outliers:
        metrics["correction/dropped_share"] = mean_metric(step.dropped, mask)
    if s.mismatch == "truncate":
        metrics["correction/capped_share"] = mean_metric(step.correction >= s.mismatch_high, mask)
        metrics["correction/weight_mean"] = mean_metric(step.correction, mask)
    if step.centering is not None:
        metrics |= {
            "centering/mass_rollout": mean_metric(step.centering.anchor_mass, mask),
            "centering/mass_policy": mean_metric(step.centering.mass, mask),
            "centering/size": mean_metric(step.centering.size, signed),
        }
    if step.ratio is not None:
        metrics |= {
            "ratio/mean": mean_metric(step.ratio, mask),
            "ratio/min": min_metric(step.ratio, mask),
            "ratio/max": max_metric(step.ratio, mask),
            "ratio/effective_sample_size": effective_size_metric(step.used_ratio, mask),
        }
        if s.truncates:
            metrics["ratio/capped_share"] = mean_metric(step.used_ratio != step.ratio, signed)
    if tokens.rollout_logprob is not None:
        metrics |= _mismatch("mismatch", tokens.rollout_logprob, tokens.detached_logprob, mask)
        log_ratio = tokens.detached_logprob - tokens.rollout_logprob
        metrics |= _by_sign("mismatch/k3_", torch.expm1(log_ratio) - log_ratio, positive, negative)
        if tokens.old_logprob is not None:
            metrics |= _mismatch("mismatch_recomputed", tokens.rollout_logprob, tokens.old_logprob, mask)
    if logprob_of(s.anchor, tokens) is not None:
        metrics |= {
            "divergence/mean": mean_metric(step.divergence, mask),
            "divergence/max": max_metric(step.divergence, mask),
            "divergence": quantiles_metric(step.divergence, mask),
        }
        metrics |= _by_sign("divergence/", step.divergence, positive, negative)
    if buckets is not None:
        metrics |= _topk(s, tokens, buckets, signed)
    return metrics


def _by_sign(name: str, value: Tensor, positive: Tensor, negative: Tensor) -> dict[str, Metric]:
    return {f"{name}positive": mean_metric(value, positive), f"{name}negative": mean_metric(value, negative)}


def _mismatch(name: str, engine: Tensor, trainer: Tensor, mask: Tensor) -> dict[str, Metric]:
    """KL(engine || trainer) from samples of the engine, two unbiased estimators of which only k1 can be negative,
    and how far the two differ on the tokens, in probability and in nats. total_variation: E |r - 1| / 2 over the
    engine's samples, TV(engine, trainer) over the whole vocabulary without bias.
    """
    log_ratio = trainer - engine
    shift = trainer.exp() - engine.exp()
    return {
        f"{name}/k1": mean_metric(-log_ratio, mask),
        f"{name}/k3": mean_metric(torch.expm1(log_ratio) - log_ratio, mask),
        f"{name}/total_variation": mean_metric(torch.expm1(log_ratio).abs() / 2, mask),
        f"{name}/shift_mean": mean_metric(shift.abs(), mask),
        f"{name}/shift_max": max_metric(shift.abs(), mask),
        f"{name}/max_abs_logprob_difference": max_metric(log_ratio.abs(), mask),
    }


def _topk(s: ObjectiveSettings, tokens: Tokens, buckets: Buckets, signed: Tensor) -> dict[str, Metric]:
    mask = tokens.mask
    ln_mu = logprob_of(s.anchor, tokens)
    binary_tv, topk_tv = measure.binary_tv(ln_mu, tokens.detached_logprob), measure.topk_tv(buckets)
    metrics = {
        "topk/tail_mass_rollout": mean_metric(buckets.anchor_other, mask),
        "topk/tail_mass_policy": mean_metric(buckets.policy_other_logprob.exp(), mask),
        "topk/sampled_outside_share": mean_metric(~buckets.sampled_in_topk, mask),
        "topk/binary_tv_mean": mean_metric(binary_tv, mask),
        "topk/topk_tv_mean": mean_metric(topk_tv, mask),
    }
    if s.delta is not None:
        if s.divergence.endswith("kl"):
            differ = (measure.binary_kl(ln_mu, tokens.detached_logprob) > s.delta) != (
                measure.topk_kl(buckets) > s.delta
            )
        else:
            differ = (binary_tv > s.delta) != (topk_tv > s.delta)
        metrics["topk/binary_disagreement"] = mean_metric(differ, signed)
    return metrics
