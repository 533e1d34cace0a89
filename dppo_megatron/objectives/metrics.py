"""Reduce metrics: over micro-batches by merging, over ranks by a sum and a max all-reduce.

No communication happens here. A trainer runs

    total = merge_metrics([out.metrics for out in micro_batches])
    sums, maxima = flatten_metrics(total)
    all_reduce(sums, SUM); all_reduce(maxima, MAX)
    logged = reduce_metrics(unflatten_metrics(total, sums, maxima))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

# Log-spaced bins 12 % wide from 1e-8 to 100, and an open bin at each end, so a quantile is exact to 6 %.
_BINS_PER_DECADE, _LOWEST_DECADE, _DECADES = 20, -8, 10
_BINS = _BINS_PER_DECADE * _DECADES + 2
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


@dataclass(frozen=True)
class Metric:
    """Contains an unfinished metric. Ranks add `sums` and take the larger `maxima`; both are fp64 vectors.

    Kinds:
        mean            sums [total, count]
        sum             sums [total]
        max             maxima [x]
        min             maxima [-x]
        quantiles       sums [bins]
        effective_size  sums [sum w, sum w^2, count]
    """

    kind: str
    sums: Float[Tensor, " n"]
    maxima: Float[Tensor, " m"]


Metrics = Mapping[str, Metric]


def mean_metric(value: Float[Tensor, " T"], where: Bool[Tensor, " T"]) -> Metric:
    """Return the mean of `value` over the positions `where`; for a bool value, the share of True."""
    masked_value = torch.where(where, value.detach().double(), 0.0)
    return _summing("mean", torch.stack([masked_value.sum(), where.sum().double()]))


def sum_metric(value: Float[Tensor, " T"], where: Bool[Tensor, " T"]) -> Metric:
    """Return the sum of `value` over the positions `where`; for a bool value, the number that are True."""
    return _summing("sum", torch.where(where, value.detach().double(), 0.0).sum()[None])


def max_metric(value: Float[Tensor, " T"], where: Bool[Tensor, " T"]) -> Metric:
    return _extreme("max", value.detach().double(), where)


def min_metric(value: Float[Tensor, " T"], where: Bool[Tensor, " T"]) -> Metric:
    return _extreme("min", -value.detach().double(), where)


def quantiles_metric(value: Float[Tensor, " T"], where: Bool[Tensor, " T"]) -> Metric:
    """Return a histogram of a non-negative `value` over `where`, in fixed bins so that merging is exact.

    Bins are 12 % wide between 1e-8 and 100. For a ratio near 1 use |ln r|.
    """
    decades = value.detach().double().clamp(min=1e-30).log10() - _LOWEST_DECADE
    # A nan goes to the lowest bin; the count of non-finite tokens reports it.
    bin_ = (decades * _BINS_PER_DECADE).nan_to_num(nan=-1.0).floor().clamp(-1, _BINS - 2).long() + 1
    counts = torch.zeros(_BINS, dtype=torch.float64, device=value.device)
    return _summing("quantiles", counts.index_add(0, bin_, where.double()))


def effective_size_metric(weight: Float[Tensor, " T"], where: Bool[Tensor, " T"]) -> Metric:
    """Return (sum w)^2 / (n sum w^2) in (0, 1], the effective share of samples in a weighted mean; w at most 1e130."""
    weights = torch.where(where, weight.detach().double().clamp(max=1e130), 0.0)  # squares of 1e48 tokens stay finite
    return _summing("effective_size", torch.stack([weights.sum(), weights.square().sum(), where.sum().double()]))


def merge_metrics(parts: Sequence[Metrics]) -> dict[str, Metric]:
    """Combine the metrics of micro-batches. Raises ValueError if the metric names differ."""
    if not parts:
        raise ValueError("merge_metrics needs at least one set of metrics")
    first = parts[0]
    for other in parts[1:]:
        odd = sorted(set(first) ^ set(other))
        if odd:
            raise ValueError(f"metrics differ between the parts to merge: {', '.join(odd)}")
    return {
        name: Metric(
            metric.kind,
            torch.stack([part[name].sums for part in parts]).sum(0),
            torch.stack([part[name].maxima for part in parts]).amax(0) if metric.maxima.numel() else metric.maxima,
        )
        for name, metric in first.items()
    }


def flatten_metrics(metrics: Metrics) -> tuple[Float[Tensor, " N"], Float[Tensor, " M"]]:
    """Return (sums [N], maxima [M]) fp64, ordered by name, so that ranks with equal names can reduce them."""
    ordered = [metrics[name] for name in sorted(metrics)]
    return torch.cat([m.sums for m in ordered]), torch.cat([m.maxima for m in ordered])


def unflatten_metrics(like: Metrics, sums: Float[Tensor, " N"], maxima: Float[Tensor, " M"]) -> dict[str, Metric]:
    """Invert flatten_metrics; `like` gives names, kinds and sizes."""
    result, at, at_max = {}, 0, 0
    for name in sorted(like):
        n, m = like[name].sums.numel(), like[name].maxima.numel()
        result[name] = Metric(like[name].kind, sums[at : at + n], maxima[at_max : at_max + m])
        at, at_max = at + n, at_max + m
    if at != sums.numel() or at_max != maxima.numel():
        raise ValueError(
            f"flattened metrics have {sums.numel()} sums and {maxima.numel()} maxima, expected {at} and {at_max}"
        )
    return result


def reduce_metrics(metrics: Metrics) -> dict[str, float]:
    """Finish every metric with one copy to the host. A metric without a sample is left out.

    Quantiles become name/p50, /p90, /p99, /p999; all other metrics keep their names.
    """
    if not metrics:
        return {}
    on_host = unflatten_metrics(metrics, *(part.cpu() for part in flatten_metrics(metrics)))
    return {
        name + suffix: value
        for name, metric in on_host.items()
        for suffix, value in _finish(metric.kind, metric.sums.tolist(), metric.maxima.tolist()).items()
    }


def _finish(kind: str, sums: list[float], maxima: list[float]) -> dict[str, float]:
    if kind == "sum":
        return {"": sums[0]}
    if kind == "mean":
        return {"": sums[0] / sums[1]} if sums[1] else {}
    if kind == "effective_size":
        total, squares, count = sums
        return {"": total * total / (count * squares)} if count and squares else {}
    if kind == "quantiles":
        return _quantiles(sums)
    if maxima[0] == -math.inf:
        return {}
    return {"": maxima[0] if kind == "max" else -maxima[0]}


def _quantiles(counts: list[float]) -> dict[str, float]:
    total = sum(counts)
    if not total:
        return {}
    result, cumulative, quantiles = {}, 0.0, list(_QUANTILES.items())
    for bin_, count in enumerate(counts):
        cumulative += count
        while quantiles and cumulative >= quantiles[0][1] * total:
            # The bin's geometric middle; the open bins at the ends report their only edge.
            middle = 10 ** (_LOWEST_DECADE + (bin_ - 0.5) / _BINS_PER_DECADE)
            ends = {0: 0.0, _BINS - 1: 10.0 ** (_LOWEST_DECADE + _DECADES)}
            result["/" + quantiles.pop(0)[0]] = ends.get(bin_, middle)
    return result


def _summing(kind: str, sums: Tensor) -> Metric:
    return Metric(kind, sums, sums.new_zeros(0))


def _extreme(kind: str, value: Tensor, where: Tensor) -> Metric:
    lowest = value.new_full((1,), -math.inf)
    masked_value = torch.where(where, value, lowest)
    return Metric(kind, value.new_zeros(0), torch.cat([masked_value, lowest]).amax()[None])
