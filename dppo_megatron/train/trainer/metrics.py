"""Record a step: how long each named part took, and the update metrics."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median

import torch

from dppo_megatron.common.hardware import peak_flops
from dppo_megatron.errors import ExpectedError
from dppo_megatron.hf.flops import ModelFlops, Work
from dppo_megatron.objectives import merge_metrics, reduce_metrics
from dppo_megatron.report.profiling import phase
from dppo_megatron.train.actor import Actor, UpdateStats

from .batches import UpdateBatch

log = logging.getLogger(__name__)

REMEMBERED, FEW = 100, 5  # steps in the median, the usual mismatch in a run; below FEW steps, nothing is reported
JUMP, JUMP_FLOOR = 5.0, 1e-3  # first: factor of the median; second: nats, above the jumps that fp32 rounding causes
# Engine and trainer must be compared under equal weights: only a step's first update has them (at staleness 0).
FIRST_UPDATE = ("mismatch/",)
SCORED = ("time/recompute_s", "time/reference_s", "time/teacher_s")  # each takes a forward pass over the step
COMPUTING = ("time/forward_backward_s", "time/optimizer_s", *SCORED)


class MismatchLimit(ExpectedError, RuntimeError):
    """Engine and trainer log-probs of the sampled tokens differ by more than the user allows."""


class MismatchHistory:
    """Warns if `mismatch/kl` is far above its median in this run. A resumed run starts with an empty history."""

    def __init__(self) -> None:
        self._history: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, step: int, kl: float | None) -> None:
        """Add a step's mismatch and warn about a jump. kl: mismatch/kl; None if the objective does not measure it."""
        if kl is None:
            return
        median_kl = median(self._history) if len(self._history) >= FEW else float("inf")
        if not kl <= max(JUMP * median_kl, JUMP_FLOOR):
            log.warning(
                "step %d: mismatch/kl jumped to %.3g nats per token between engine and trainer; its median over the "
                "last %d steps is %.3g. See docs/failures.md",
                *(step, kl, len(self._history), median_kl),
            )
        if math.isfinite(kl):
            self._history.append(kl)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Computes a step's model FLOPs per second of computation."""

    flops: ModelFlops
    ranks: int
    peak: float | None  # FLOP/s of one rank's device; None on CPUs and unknown devices

    @classmethod
    def from_actor(cls, actor: Actor) -> Throughput:
        model, layout = actor.config.model, actor.layout
        device = torch.cuda.get_device_name(layout.device) if layout.device.type == "cuda" else "cpu"
        return cls(
            ModelFlops.from_config(actor.hf, model.lora), layout.world_size, peak_flops(device, model.computes_in)
        )

    def metrics(self, work: Work, times: Mapping[str, float]) -> dict[str, float]:
        """Return the throughput metrics. work: the step's updates on all ranks. times: seconds by metric name."""
        flops = self.flops.update(work) + sum(name in times for name in SCORED) * self.flops.forward(work)
        rate = flops / self.ranks / sum(times.get(name, 0.0) for name in COMPUTING)
        mfu = {} if self.peak is None else {"throughput/mfu": rate / self.peak}
        return {"throughput/tflops_per_gpu": rate / 1e12, **mfu}


class StepMetrics:
    """Collects a step's metrics over all updates; a few metrics come from the first update only."""

    def __init__(self, throughput: Throughput | None = None) -> None:
        self._throughput = throughput
        self._started = time.perf_counter()
        self._values: dict[str, float] = {}
        self._updates: list[tuple[UpdateStats, UpdateBatch]] = []

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        with phase(part) as timed:
            yield
        self._values[f"time/{part}_s"] = timed.seconds

    def add(self, values: Mapping[str, float]) -> None:
        self._values.update(values)

    def add_update(self, stats: UpdateStats, batch: UpdateBatch) -> None:
        self._updates.append((stats, batch))

    @property
    def mismatch(self) -> float | None:
        """Return the KL between engine and trainer in the step's first update; None if it is not measured."""
        return self._updates[0][0].metrics.get("mismatch/kl") if self._updates else None

    def check_mismatch(self, limit: float | None, step: int) -> None:
        """Raise `MismatchLimit` if the step's mismatch/kl exceeds `rollout.max_mismatch_kl`.

        Also raises it if the value is not finite or the objective does not measure it.
        """
        if limit is None or not self._updates:
            return
        kl = self.mismatch
        if kl is None:
            raise MismatchLimit(
                f"rollout.max_mismatch_kl = {limit:g}: the objective reports no metric mismatch/kl, the KL between "
                "engine and trainer, so there is nothing to limit; report it, or remove the setting"
            )
        if not kl <= limit:
            raise MismatchLimit(
                f"step {step}: mismatch/kl = {kl:.3g} nats per token between engine and trainer, more than "
                f"rollout.max_mismatch_kl = {limit:g}. The engine samples another policy than the trainer trains: "
                "raise its precision (engine.dtype), use rollout.routing_replay for experts, lower "
                "rollout.max_staleness, or raise the limit"
            )

    @property
    def masked_tokens(self) -> Counter[int]:
        """Return how often the step's updates found each token id outside the trust region."""
        return sum((Counter(stats.masked) for stats, _ in self._updates), Counter())

    def finish(self) -> dict[str, float]:
        values = dict(self._values)
        values["time/step_s"] = time.perf_counter() - self._started
        values["train/updates"] = float(len(self._updates))
        if self._updates:
            values |= self._update_metrics()
            values["throughput/tokens_per_s"] = values["train/tokens"] / values["time/step_s"]
            if self._throughput is not None:
                work = zip(*((b.rows, b.pairs, s.loss_tokens) for s, b in self._updates), strict=True)
                values |= self._throughput.metrics(Work(*map(sum, work)), values)
        return values

    def _update_metrics(self) -> dict[str, float]:
        stats = [s for s, _ in self._updates]
        values = {
            "train/loss": fmean(s.loss for s in stats),
            "train/lr": stats[-1].lr,
            "train/skipped_updates": float(sum(s.skipped for s in stats)),
            "train/sequences": float(sum(b.sequences for _, b in self._updates)),
            "train/tokens": float(sum(s.loss_tokens for s in stats)),
            "train/computed_rows": float(sum(b.rows for _, b in self._updates)),
            "time/forward_backward_s": sum(s.forward_backward_s for s in stats),
            "time/optimizer_s": sum(s.optimizer_s for s in stats),
        }
        if norms := [s.grad_norm for s in stats if not s.overflowed]:  # an overflow has an infinite norm
            values["train/grad_norm"] = fmean(norms)
        if stats[-1].loss_scale is not None:
            values["train/loss_scale"] = stats[-1].loss_scale
            values["train/overflowed_updates"] = float(sum(s.overflowed for s in stats))
        first = stats[0].metrics
        whole = reduce_metrics(merge_metrics([s.parts for s in stats]))
        for name, value in whole.items():
            if not name.startswith(FIRST_UPDATE):
                values[name] = value
            elif name in first:  # a metric without tokens, e.g. with A < 0, is absent
                values[name] = first[name]
        return values | self._improvement_bounds(whole)

    def _improvement_bounds(self, whole: Mapping[str, float]) -> dict[str, float]:
        """Return the bounds that DPPO (arXiv 2602.04879) subtracts from the surrogate's gain, for |rewards| up to 1.

        Theorem 3.2: 2 T (T - 1) D_max^2, where T is `horizon`, the longest response, and D_max the largest TV of any
        token. Here the largest |pi - mu| of a sampled token replaces D_max, as a lower bound. Appendix B.3 is tighter
        for long responses: 4 E_mu sum_t TV(mu, pi), summed over a response and estimated without bias. With turns and
        branches, count only tokens that the policy sampled.
        """
        horizon = self._values.get("rollout/response_tokens_max")
        if horizon is None or not {"mismatch/total_variation", "train/tokens"} <= whole.keys():
            return {}
        mean_length = whole["train/tokens"] / sum(b.trajectories or b.sequences for _, b in self._updates)
        return {
            "bound/quadratic": 2 * horizon * (horizon - 1) * whole["mismatch/shift_max"] ** 2,
            "bound/linear": 4 * mean_length * whole["mismatch/total_variation"],
        }
