"""Compute an objective's per-token loss from [T] statistics, with one code path for all settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dppo_megatron.errors import with_module

from .batch_statistic import beyond_budget, statistic_sums, statistic_value
from .centering import expected_score
from .contract import ObjectiveOutput, ObjectiveProtocol, TopKLogprobs, missing_attributes
from .corrections import mismatch_weight, reference_kl, rejected, rollout_kl
from .describe import describe
from .distillation import distill, effective_advantage
from .inputs import Buckets, Tokens, check_and_clean, make_buckets
from .metrics import mean_metric
from .policy_term import join, policy_term, product, term_slope, term_value, weight_over_plain_ratio
from .presets import PRESETS
from .settings import ObjectiveError, ObjectiveSettings, nearest, override
from .token_metrics import TokenResults, token_metrics
from .trust_region import logprob_of, outside_response_region

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Objective(ObjectiveProtocol):
    """Implements a named method. Build it with build_objective."""

    name: str
    settings: ObjectiveSettings
    statistic: Tensor | None = None  # batch statistic, see `with_statistic`
    step: int = 0  # training step, for distillation_steps

    def at_step(self, step: int) -> Objective:
        return replace(self, step=step)

    def statistic_sums(
        self, old_logprob: Tensor, rollout_logprob: Tensor, advantage: Tensor, mask: Tensor, **extra: Tensor
    ) -> Float[Tensor, " n"]:
        teacher = extra.get("teacher_logprob")
        advantage = effective_advantage(self.settings, advantage, old_logprob, teacher, self.step)
        return statistic_sums(self.settings.batch_statistic, old_logprob - rollout_logprob, advantage, mask != 0)

    def with_statistic(self, sums: Float[Tensor, " n"]) -> Objective:
        value = statistic_value(self.settings.batch_statistic, sums, self.settings.second_moment_budget)
        return replace(self, statistic=value)

    def describe(self) -> str:
        return describe(self.name, self.settings)

    def __call__(
        self, *, topk: TopKLogprobs | None = None, teacher: TopKLogprobs | None = None, **inputs: Tensor | None
    ) -> ObjectiveOutput:
        """Return the loss of each sampled token; `ObjectiveProtocol.__call__` describes the inputs.

            loss = join(value, slope) + penalty + centering + KL + rollout KL - entropy + distillation

        Three rules drop tokens from the policy term, the penalty and the distillation: the mismatch mask, the rejection
        of a response, and the response region with M2PO's batch budget. Rejection and region also drop the centering. A
        dropped token is reported in `masked_tokens` only if a region dropped it. Distillation also skips tokens outside
        a mask's threshold.
        Example: a response with mu = [0.5, 0.5, 0.1] and pi = [0.6, 0.5, 0.5]. With `mismatch_high` 2, mismatch drops
        the third token (ratio 5). With `rejection='any_token'`, `rejection_high` 2, rejection drops all three tokens.
        With `response_region='max'`, binary TV above 0.3, the region drops all three.
        Raises ObjectiveError for inputs that are missing, unknown, misshapen, or in 16-bit precision.
        """
        s = self.settings
        tokens = check_and_clean(self, **inputs)
        if self.needs_teacher:
            distillation_loss, metric_values = self._distill(tokens, teacher)
        policy = tokens.old_logprob if self.needs_old else tokens.detached_logprob
        statistic = self._statistic(tokens)
        advantage = effective_advantage(s, tokens.advantage, policy, tokens.teacher_logprob, self.step)
        tokens = replace(tokens, advantage=advantage)
        buckets = self._buckets(tokens, topk)
        effective_size = statistic if s.batch_statistic == "effective_size" else None
        term = policy_term(s, tokens, buckets, effective_size)
        # Centering weighs listed tokens like sampled tokens, so the mismatch compares pi with mu.
        mismatch_tokens = tokens if s.centering == "none" else replace(tokens, old_logprob=None)
        correction, by_mismatch = mismatch_weight(s, mismatch_tokens)
        by_rejection = rejected(s, mismatch_tokens)
        by_region = self._outside_region(tokens, buckets, statistic)
        dropped = by_rejection | by_region
        correction = torch.where(dropped, torch.zeros_like(correction), correction)  # mismatch has already set 0

        w = product(term.weight, correction)
        coefficient = product(term.used_ratio, w)  # r w
        slope = term_slope(coefficient, tokens.advantage)
        loss = join(term_value(s, term, correction, slope, tokens), slope, tokens)
        controlled = term.controlled
        if controlled.penalty is not None:
            penalty = controlled.penalty
            if controlled.slope is not None:
                penalty = join(penalty, -controlled.slope, tokens)
            loss = loss + torch.where(by_mismatch | dropped, torch.zeros_like(penalty), penalty)
        centering = None
        if s.centering != "none":
            centering = expected_score(s, tokens, topk, effective_size)
            loss = loss + tokens.advantage * torch.where(dropped, torch.zeros_like(loss), centering.score)
        kl = reference_kl(s, tokens, term.used_ratio) if self.needs_reference else None
        if kl is not None:
            loss = loss + s.reference_kl_coefficient * kl
        if s.rollout_kl != "none":
            trust = 1 if effective_size is None else 1 - effective_size.to(loss.dtype)
            loss = loss + s.rollout_kl_coefficient * trust * rollout_kl(s, tokens, buckets)
        if self.needs_entropy:
            loss = loss - s.entropy_coefficient * tokens.entropy
        metrics = {}
        if self.needs_teacher:
            distillation_dropped = by_mismatch | dropped | (term.position.exceeds & s.masks)
            loss = loss + torch.where(distillation_dropped, torch.zeros_like(loss), distillation_loss)
            metric_values = metric_values | {"dropped_share": distillation_dropped}
            metrics = {f"distillation/{name}": mean_metric(value, tokens.mask) for name, value in metric_values.items()}

        has_ratio = s.importance != "none"
        results = TokenResults(
            loss=loss.detach(),
            weight=weight_over_plain_ratio(s, tokens, term, coefficient, w),
            ratio=term.ratio if has_ratio else None,
            used_ratio=term.used_ratio if has_ratio else None,
            divergence=term.position.divergence,
            outside=controlled.outside | by_region,
            exceeds=term.position.exceeds,
            dropped=by_mismatch | by_rejection,
            correction=correction,
            centering=centering,
            reference_kl=None if kl is None else kl.detach(),
        )
        return ObjectiveOutput(
            loss=loss,
            weight=results.weight,
            masked_tokens=results.outside & (tokens.advantage != 0),
            divergence=torch.where(tokens.mask, results.divergence, tokens.zeros),
            metrics=token_metrics(s, tokens, buckets, results) | metrics,
        )

    def _distill(self, tokens: Tokens, teacher: TopKLogprobs | None) -> tuple[Float[Tensor, " T"], dict[str, Tensor]]:
        if teacher is None:
            raise ObjectiveError(f"{self.name} needs `teacher`, the top-K list of a teacher")
        if tokens.logprob.requires_grad and not teacher.logprob.requires_grad:
            raise ObjectiveError(f"{self.name} needs a gradient through teacher.logprob: pass it without detach()")
        return distill(self.settings, tokens, make_buckets(self, tokens, teacher, is_teacher=True), self.step)

    def _statistic(self, tokens: Tokens) -> Tensor | None:
        """Return the batch statistic; if none was given, compute it from this call's tokens."""
        if not self.needs_statistic or self.statistic is not None:
            return self.statistic
        teacher_inputs = {} if tokens.teacher_logprob is None else {"teacher_logprob": tokens.teacher_logprob}
        sums = self.statistic_sums(
            tokens.old_logprob, tokens.rollout_logprob, tokens.advantage, tokens.mask, **teacher_inputs
        )
        return self.with_statistic(sums).statistic

    def _outside_region(self, tokens: Tokens, buckets: Buckets | None, statistic: Tensor | None) -> Tensor:
        """Return [T] bool: tokens that the response region or M2PO's batch budget drops."""
        s = self.settings
        outside = torch.zeros_like(tokens.mask)
        if s.response_region != "none":
            outside = outside_response_region(s, tokens, buckets)
        if s.batch_statistic.startswith("second_moment"):
            log_ratio = tokens.old_logprob - tokens.rollout_logprob
            outside = outside | (beyond_budget(s.batch_statistic, log_ratio, tokens.advantage, statistic) & tokens.mask)
        return outside

    def _buckets(self, tokens: Tokens, topk: TopKLogprobs | None) -> Buckets | None:
        if topk is None:
            if self.needs_topk:
                raise ObjectiveError(f"{self.name} needs `topk`, the engine's top-K list")
            return None
        if logprob_of(self.settings.anchor, tokens) is None:
            return None
        if not self.needs_topk and self.settings.anchor == "old" and topk.old_logprob is None:
            return None  # only metrics, which describe the anchor, would read the list
        if self.needs_topk_gradient and tokens.logprob.requires_grad and not topk.logprob.requires_grad:
            raise ObjectiveError(f"{self.name} needs a gradient through topk.logprob: pass it without detach()")
        return make_buckets(self, tokens, topk)


def build_objective(name: str, **overrides: Any) -> ObjectiveProtocol:
    """Return a preset by name with any axis overridden, or load a user's objective from "package.module:attribute".

    The attribute may be ObjectiveSettings (overridable like a preset), a ready objective, or a callable that takes the
    overrides and returns an objective. An objective has every part of `ObjectiveProtocol`.
    Raises ObjectiveError for an unknown name or axis (with the nearest name), an ill-typed value, a meaningless
    combination, or a path that does not name an objective.
    """
    if not isinstance(name, str):
        raise ObjectiveError(f"an objective's name is a string, got {name!r}")
    if ":" in name:
        return _load(name, overrides)
    if name not in PRESETS:
        raise ObjectiveError(f"unknown objective {name!r}: {with_module(name) or nearest(name, PRESETS)}")
    try:
        return Objective(name, override(PRESETS[name].settings, overrides))
    except ObjectiveError as error:
        raise ObjectiveError(f"objective {name}: {error}") from None


def _load(path: str, overrides: dict[str, Any]) -> ObjectiveProtocol:
    module_name, _, attribute = path.partition(":")
    target = _foreign(f"objective {path!r} cannot be loaded", lambda: getattr(import_module(module_name), attribute))
    if isinstance(target, ObjectiveSettings):
        return Objective(path, override(target, overrides))
    missing = missing_attributes(target)
    if missing and callable(target):
        target = _foreign(f"objective {path!r} rejected its settings", partial(target, **overrides))
        missing = missing_attributes(target)
    elif not missing and overrides:
        raise ObjectiveError(f"objective {path!r} is an instance; remove the settings {', '.join(overrides)}")
    if missing:
        raise ObjectiveError(
            f"objective {path!r} is a {type(target).__name__} and lacks {', '.join(missing)}; inherit from Objective"
        )
    return target


def _foreign(failed: str, call: Callable[[], Any]) -> Any:
    """Run user code, which may raise any error, including SystemExit, and return the result."""
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ObjectiveError(f"{failed}: {type(error).__name__}: {error}") from error
