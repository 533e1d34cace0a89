"""An objective: settings and one code path from [T] statistics to a per-token loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import inputs
from .controls import CONTROLS
from .corrections import mismatch_weight, reference_kl
from .describe import describe
from .inputs import Buckets, Tokens, TopKLogprobs
from .metrics import Metric
from .presets import PRESETS
from .settings import ObjectiveError, ObjectiveSettings, nearest, override
from .token_metrics import Step, token_metrics
from .trust_region import locate, logprob_of, ratio_to

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class ObjectiveOutput:
    """What an objective returns for every token.

    loss [T]: per token, unreduced, with gradient, 0 where mask is False.
    weight [T]: d loss / d z = -A r weight (e_a - pi) for the policy term, r = pi/mu (1 where there is no
    rollout policy), 0 where mask is False. The terms for KL, entropy and the top-K penalty are not in it.
    masked_tokens [T] bool: tokens with A != 0 outside the trust region, whose gradient the control removed
    (or, for 'mask_quadratic', penalised).
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

    @property
    def needs_topk(self) -> bool:
        return self.settings.reads_topk

    @property
    def needs_topk_gradient(self) -> bool:
        return self.settings.divergence == "topk_tv" and "quadratic" in self.settings.control

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
    def needs_reference(self) -> bool:
        return self.settings.reference_kl != "none"

    @property
    def needs_entropy(self) -> bool:
        """True when entropy must be given and must carry a gradient. It may always be given, as a metric."""
        return self.settings.entropy_coefficient > 0

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
    ) -> ObjectiveOutput:
        """Per-token loss of the sampled tokens.

        All [T]. logprob, rollout_logprob, old_logprob, reference_logprob: fp32/fp64 ln p of the
        sampled token, temperature applied. mask: bool or 0/1, tokens that carry loss; whatever stands
        elsewhere, nan included, adds nothing to loss, gradient or metrics. sequence_ids: numbered from 0 and
        below T, each sequence whole in this call. The needs_* properties name what is required. Raises
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
        )
        buckets = self._buckets(tokens, topk)
        position = locate(s, tokens, buckets)
        ratio = _importance_ratio(s, tokens)
        used = ratio.clamp(s.ratio_floor, s.ratio_cap) if _truncates(s) else ratio
        controlled = CONTROLS[s.control, s.divergence](s, position, used, buckets)
        correction, dropped = mismatch_weight(s, tokens)
        w = _product(controlled.weight, correction)
        if s.path == "ratio":  # a truncated ratio is constant
            w = torch.where(used == ratio, w, torch.zeros_like(w))
        coefficient = _product(used, w)  # r w
        slope = _product(coefficient, tokens.advantage)  # A r w
        if s.path == "logprob":
            value = -slope * tokens.detached_logprob
        else:
            value = _product(controlled.loss, correction * (tokens.advantage != 0))
        # The value of the formula; its gradient is exactly -A r w, the difference is 0.
        loss = value - slope * (tokens.logprob - tokens.detached_logprob)
        if controlled.penalty is not None:
            loss = loss + torch.where(dropped, torch.zeros_like(controlled.penalty), controlled.penalty)
        kl = reference_kl(s, tokens, used) if self.needs_reference else None
        if kl is not None:
            loss = loss + s.reference_kl_coefficient * kl
        if self.needs_entropy:
            loss = loss - s.entropy_coefficient * tokens.entropy

        weight = _weight_over_plain_ratio(s, tokens, coefficient, w, ratio, used)
        outside = controlled.outside & (tokens.advantage != 0)
        known = s.importance != "none"
        step = Step(
            loss=loss.detach(),
            weight=weight,
            ratio=ratio if known else None,
            used_ratio=used if known else None,
            divergence=position.divergence,
            outside=controlled.outside,
            dropped=dropped,
            reference_kl=None if kl is None else kl.detach(),
        )
        return ObjectiveOutput(
            loss=loss,
            weight=weight,
            masked_tokens=outside,
            divergence=torch.where(tokens.mask, position.divergence, tokens.zeros),
            metrics=token_metrics(s, tokens, buckets, step),
        )

    def _buckets(self, tokens: Tokens, topk: TopKLogprobs | None) -> Buckets | None:
        if topk is None:
            if self.needs_topk:
                raise ObjectiveError(f"{self.name} needs topk: {self.settings.divergence}, {self.settings.direction}")
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


def _importance_ratio(s: ObjectiveSettings, tokens: Tokens) -> Tensor:
    """r = pi(a) / mu(a), or to the old policy, before cap and floor; 1 without importance sampling."""
    if s.importance == "none":
        return torch.ones_like(tokens.detached_logprob)
    return ratio_to(logprob_of(s.importance, tokens), s, tokens)


def _product(value: Tensor, factor: Tensor) -> Tensor:
    """value * factor, and 0 where factor is 0: a token that was taken out stays out, though its ratio overflows."""
    return torch.where(factor == 0, torch.zeros_like(value), value * factor)


def _truncates(s: ObjectiveSettings) -> bool:
    return s.ratio_cap is not None or s.ratio_floor is not None


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
