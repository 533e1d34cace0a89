"""An objective: settings and one code path from [T] statistics to a per-token loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import inputs
from .batch_statistic import beyond_budget, statistic_sums, statistic_value
from .centering import expected_score, without_old
from .corrections import mismatch_weight, reference_kl, rejected, rollout_kl
from .describe import describe
from .inputs import Buckets, Tokens, TopKLogprobs
from .metrics import Metric
from .policy_term import policy_term, product
from .presets import PRESETS
from .response_region import outside_response_region
from .settings import ObjectiveError, ObjectiveSettings, nearest, override
from .token_metrics import Step, token_metrics
from .trust_region import logprob_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class ObjectiveOutput:
    """What an objective returns for every token.

    loss [T]: per token, unreduced, with gradient, 0 where mask is False.
    weight [T]: d loss / d z = -A r weight (e_a - pi) for the policy term, r = pi/mu (1 where there is no
    rollout policy), 0 where mask is False. Other terms are not in it: KL, entropy, centering, and the penalties of
    the top K and of `penalty`.
    masked_tokens [T] bool: tokens with A != 0 outside the trust region, whose gradient the control removed
    (or, for 'mask_quadratic', penalised), or that the region of responses dropped.
    divergence [T]: the configured D, 0 where mask is False.
    metrics: name -> Metric.
    """

    loss: Float[Tensor, " T"]
    weight: Float[Tensor, " T"]
    masked_tokens: Bool[Tensor, " T"]
    divergence: Float[Tensor, " T"]
    metrics: dict[str, Metric]


@dataclass(frozen=True)
class Objective:
    """A named method. Build it with build_objective."""

    name: str
    settings: ObjectiveSettings
    statistic: Tensor | None = None  # of the whole batch, see `with_statistic`

    @property
    def needs_topk(self) -> bool:
        return self.settings.reads_topk

    @property
    def needs_topk_gradient(self) -> bool:
        s = self.settings
        return s.centering != "none" or (s.divergence == "topk_tv" and "quadratic" in s.control)

    @property
    def needs_rollout(self) -> bool:
        return inputs.needs_rollout(self.settings)

    @property
    def needs_old(self) -> bool:
        return inputs.needs_old(self.settings)

    @property
    def needs_sequences(self) -> bool:
        return inputs.needs_sequences(self.settings)

    @property
    def needs_positions(self) -> bool:
        """True when the order of tokens within a sequence matters: give positions unless they stand in that order."""
        return inputs.needs_positions(self.settings)

    @property
    def needs_statistic(self) -> bool:
        """True when a number of the whole batch is wanted before its first micro-batch, see `batch_statistic`."""
        return self.settings.batch_statistic != "none"

    @property
    def moves_without_advantage(self) -> bool:
        """True when tokens with A = 0 have a gradient, too."""
        s = self.settings
        penalises = "quadratic" in s.control and s.penalty_weight == "one"
        return self.needs_reference or self.needs_entropy or s.rollout_kl != "none" or penalises

    @property
    def needs_reference(self) -> bool:
        return self.settings.reference_kl != "none"

    @property
    def needs_entropy(self) -> bool:
        """True when entropy must be given and must carry a gradient. It may always be given, as a metric."""
        return self.settings.entropy_coefficient > 0

    def statistic_sums(
        self,
        old_logprob: Float[Tensor, " T"],
        rollout_logprob: Float[Tensor, " T"],
        advantage: Float[Tensor, " T"],
        mask: Bool[Tensor, " T"],
    ) -> Float[Tensor, " n"]:
        """What to add over all tokens of the batch, fp64: micro-batches and ranks alike."""
        return statistic_sums(self.settings.batch_statistic, old_logprob - rollout_logprob, advantage, mask != 0)

    def with_statistic(self, sums: Float[Tensor, " n"]) -> Objective:
        """This objective for a batch whose `statistic_sums` add up to `sums`."""
        value = statistic_value(self.settings.batch_statistic, sums, self.settings.second_moment_budget)
        return replace(self, statistic=value)

    def describe(self) -> str:
        """The method in words, a few lines, for the top of a log."""
        return describe(self.name, self.settings)

    def __call__(
        self,
        *,
        logprob: Float[Tensor, " T"],
        mask: Bool[Tensor, " T"],
        rollout_logprob: Float[Tensor, " T"] | None = None,
        advantage: Float[Tensor, " T"] | None = None,
        topk: TopKLogprobs | None = None,
        old_logprob: Float[Tensor, " T"] | None = None,
        sequence_ids: Int[Tensor, " T"] | None = None,
        reference_logprob: Float[Tensor, " T"] | None = None,
        entropy: Float[Tensor, " T"] | None = None,
        positions: Int[Tensor, " T"] | None = None,
    ) -> ObjectiveOutput:
        """Per-token loss of the sampled tokens.

        All [T]. logprob, rollout_logprob, old_logprob, reference_logprob: fp32/fp64 ln p of the
        sampled token, temperature applied. mask: bool or 0/1, tokens that carry loss; whatever stands
        elsewhere, nan included, adds nothing to loss, gradient or metrics. sequence_ids: numbered from 0 and
        below T, each sequence whole in this call. positions: order within a sequence; None = as given. The needs_*
        properties name what is required. Raises
        ObjectiveError for inputs that are missing, misshapen, or of 16-bit precision. Does not synchronise
        with the host.
        """
        s = self.settings
        tokens = inputs.check_and_clean(
            s,
            self.name,
            logprob=logprob,
            mask=mask,
            rollout_logprob=rollout_logprob,
            old_logprob=old_logprob,
            reference_logprob=reference_logprob,
            advantage=advantage,
            entropy=entropy,
            sequence_ids=sequence_ids,
            positions=positions,
        )
        buckets = self._buckets(tokens, topk)
        statistic = self._statistic(tokens)
        effective_size = statistic if s.batch_statistic == "effective_size" else None
        term = policy_term(s, tokens, buckets, effective_size)
        position, ratio, used, controlled = term.position, term.ratio, term.used, term.controlled
        centred = s.centering != "none"
        correction, dropped = mismatch_weight(s, without_old(tokens) if centred else tokens)
        rejects = rejected(s, without_old(tokens) if centred else tokens)
        leaves = self._leaves(tokens, buckets, statistic)
        gone = rejects | leaves
        correction = torch.where(gone, torch.zeros_like(correction), correction)
        w = product(term.weight, correction)
        coefficient = product(used, w)  # r w
        slope = product(coefficient, tokens.advantage)  # A r w
        if s.path == "logprob":
            value = -slope * tokens.detached_logprob
        else:
            value = product(controlled.loss, correction * (tokens.advantage != 0))
        # The value of the formula; its gradient is exactly -A r w, the difference is 0.
        loss = value - slope * (tokens.logprob - tokens.detached_logprob)
        if controlled.penalty is not None:
            penalty = controlled.penalty
            if controlled.slope is not None:
                penalty = penalty + controlled.slope * (tokens.logprob - tokens.detached_logprob)
            loss = loss + torch.where(dropped | gone, torch.zeros_like(penalty), penalty)
        centering = expected_score(s, tokens, topk, effective_size) if centred else None
        if centering is not None:
            loss = loss + tokens.advantage * torch.where(gone, torch.zeros_like(loss), centering.score)
        kl = reference_kl(s, tokens, used) if self.needs_reference else None
        if kl is not None:
            loss = loss + s.reference_kl_coefficient * kl
        if s.rollout_kl != "none":
            trust = 1 if effective_size is None else 1 - effective_size.to(loss.dtype)
            loss = loss + s.rollout_kl_coefficient * trust * rollout_kl(s, tokens)
        if self.needs_entropy:
            loss = loss - s.entropy_coefficient * tokens.entropy

        weight = _weight_over_plain_ratio(s, tokens, coefficient, w, ratio, used)
        known = s.importance != "none"
        step = Step(
            loss=loss.detach(),
            weight=weight,
            ratio=ratio if known else None,
            used_ratio=used if known else None,
            divergence=position.divergence,
            outside=controlled.outside | leaves,
            beyond=position.beyond,
            dropped=dropped | rejects,
            correction=correction,
            centering=centering,
            reference_kl=None if kl is None else kl.detach(),
        )
        return ObjectiveOutput(
            loss=loss,
            weight=weight,
            masked_tokens=step.outside & (tokens.advantage != 0),
            divergence=torch.where(tokens.mask, position.divergence, tokens.zeros),
            metrics=token_metrics(s, tokens, buckets, step),
        )

    def _statistic(self, tokens: Tokens) -> Tensor | None:
        """The batch's, or that of this call's tokens where nobody has given it."""
        if not self.needs_statistic or self.statistic is not None:
            return self.statistic
        sums = self.statistic_sums(tokens.old_logprob, tokens.rollout_logprob, tokens.advantage, tokens.mask)
        return self.with_statistic(sums).statistic

    def _leaves(self, tokens: Tokens, buckets: Buckets | None, statistic: Tensor | None) -> Tensor:
        """[T] bool: tokens that the region of responses drops, or M2PO's budget of the batch."""
        s = self.settings
        gone = torch.zeros_like(tokens.mask)
        if s.response_region != "none":
            gone = outside_response_region(s, tokens, buckets)
        if s.batch_statistic.startswith("second_moment"):
            log_ratio = tokens.old_logprob - tokens.rollout_logprob
            gone = gone | (beyond_budget(s.batch_statistic, log_ratio, tokens.advantage, statistic) & tokens.mask)
        return gone

    def _buckets(self, tokens: Tokens, topk: TopKLogprobs | None) -> Buckets | None:
        if topk is None:
            if self.needs_topk:
                raise ObjectiveError(f"{self.name} needs topk, the engine's list of likely tokens")
            return None
        if logprob_of(self.settings.anchor, tokens) is None:
            return None
        if not self.needs_topk and self.settings.anchor == "old" and topk.old_logprob is None:
            return None  # only metrics would read it, and they are about the anchor
        if self.needs_topk_gradient and tokens.logprob.requires_grad and not topk.logprob.requires_grad:
            raise ObjectiveError(f"{self.name} needs a gradient through topk.logprob, which carries none")
        return inputs.make_buckets(self.settings, self.name, tokens, topk)


def build_objective(name: str, **overrides: Any) -> Objective:
    """A preset by name with any axis overridden, or a user's own by dotted path "package.module:attribute".

    The attribute may be ObjectiveSettings (overridable like a preset), a ready objective, or a callable that
    takes the overrides and returns one; an objective has the attributes and the call of Objective.
    Raises ObjectiveError for an unknown name or axis (with the nearest), an ill-typed value, a combination
    without meaning, or a path that does not lead to an objective.
    """
    if not isinstance(name, str):
        raise ObjectiveError(f"an objective's name is a string, got {name!r}")
    if ":" in name:
        return _load(name, overrides)
    if name not in PRESETS:
        raise ObjectiveError(f"unknown objective {name!r}: {nearest(name, PRESETS)}")
    try:
        return Objective(name, override(PRESETS[name].settings, overrides))
    except ObjectiveError as error:
        raise ObjectiveError(f"objective {name}: {error}") from None


def _load(path: str, overrides: dict[str, Any]) -> Objective:
    module_name, _, attribute = path.partition(":")
    target = _foreign(f"objective {path!r} cannot be loaded", lambda: getattr(import_module(module_name), attribute))
    if isinstance(target, ObjectiveSettings):
        return Objective(path, override(target, overrides))
    lacking = _lacking(target)
    if lacking and callable(target):
        target = _foreign(f"objective {path!r} refused its settings", partial(target, **overrides))
        lacking = _lacking(target)
    elif not lacking and overrides:
        raise ObjectiveError(f"objective {path!r} is ready made and takes no settings: {', '.join(overrides)}")
    if lacking:
        raise ObjectiveError(f"objective {path!r} gave {type(target).__name__}, which lacks {', '.join(lacking)}")
    return target


def _foreign(failed: str, call: Callable[[], Any]) -> Any:
    """Result of the user's code, which can raise anything: sys.exit too must not end a command without a word."""
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ObjectiveError(f"{failed}: {type(error).__name__}: {error}") from error


def _lacking(target: Any) -> list[str]:
    if isinstance(target, type):
        return ["an instance"]
    needs = ("topk", "old", "reference", "sequences", "entropy")
    wanted = ("name", "settings", "describe", *(f"needs_{what}" for what in needs), "__call__")
    return [attribute for attribute in wanted if not hasattr(target, attribute)]


def _weight_over_plain_ratio(
    s: ObjectiveSettings, tokens: Tokens, coefficient: Tensor, w: Tensor, ratio: Tensor, used: Tensor
) -> Tensor:
    """coefficient / r, r = pi(a)/mu(a) of the token; exactly w where no other ratio is used."""
    if s.importance == "none":
        weight = w
    elif s.importance == "rollout" and s.ratio_level == "token":
        weight = torch.where(used == ratio, w, coefficient / ratio)
    else:
        base = tokens.old_logprob if tokens.rollout_logprob is None else tokens.rollout_logprob
        weight = coefficient / (tokens.detached_logprob - base).exp()
    return torch.where(tokens.mask, weight, torch.zeros_like(weight))
