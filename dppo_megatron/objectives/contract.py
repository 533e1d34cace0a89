"""The contract between a trainer and an objective: its call, its output, and the needs that say what it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from .settings import ObjectiveSettings

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    from .metrics import Metric


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
class ObjectiveOutput:
    """The result of an objective for every token.

    loss [T]: per token, unreduced, with gradient, 0 where mask is False.
    weight [T]: d loss / d z = -A r weight (e_a - pi) for the policy term, r = pi/mu (1 where there is no
    rollout policy), 0 where mask is False. Other terms are not in it: KL, entropy, centering, and the penalties of
    the top K and of `penalty`.
    masked_tokens [T] bool: tokens with A != 0 outside the trust region, whose gradient the control removed
    (or, for 'mask_quadratic', penalised), or that the region of responses dropped.
    divergence [T]: the configured D, 0 where mask is False.
    metrics: name -> Metric, the same names in every call; a run logs them under these names.
    """

    loss: Float[Tensor, " T"]
    weight: Float[Tensor, " T"]
    masked_tokens: Bool[Tensor, " T"]
    divergence: Float[Tensor, " T"]
    metrics: dict[str, Metric]


class ObjectiveProtocol(Protocol):
    """An objective as the trainer and the integrations read it.

    Each need is a flag that is fixed when the objective is built. A caller gives the inputs that the needs name and
    may leave out the others. A class that inherits from this or from `Objective` derives every need from its settings,
    and may replace one by an attribute, e.g. `needs_entropy = True`.
    """

    name: str
    settings: ObjectiveSettings

    @property
    def needs_rollout(self) -> bool:
        """`rollout_logprob`: ln mu(a) by the rollout policy."""
        s = self.settings
        corrects = s.mismatch != "none" or s.rejection != "none" or s.drops_outliers
        compares = s.response_region != "none" or s.rollout_kl != "none" or s.batch_statistic != "none"
        anchored = s.has_region and s.anchor == "rollout"
        return not s.supervised and (s.importance == "rollout" or corrects or compares or s.reads_topk or anchored)

    @property
    def needs_old(self) -> bool:
        """`old_logprob`, and `topk.old_logprob` for a top-K method: by the weights that the step starts from."""
        s = self.settings
        return s.importance == "old" or (s.has_region and s.anchor == "old") or s.batch_statistic != "none"

    @property
    def needs_reference(self) -> bool:
        """`reference_logprob`: by the model that training starts from."""
        return self.settings.reference_kl != "none"

    @property
    def needs_topk(self) -> bool:
        """`topk`: the engine's list of likely tokens, scored by the policy in training."""
        return self.settings.reads_topk

    @property
    def needs_topk_gradient(self) -> bool:
        """`topk.logprob` with a gradient."""
        s = self.settings
        return s.centering != "none" or (s.divergence == "topk_tv" and "quadratic" in s.control)

    @property
    def needs_entropy(self) -> bool:
        """`entropy` with a gradient. Without the need it may still be given, as a metric."""
        return self.settings.entropy_coefficient > 0

    @property
    def needs_sequences(self) -> bool:
        """`sequence_ids`, and each sequence whole in one call."""
        s = self.settings
        weighs = s.mismatch != "none" and s.mismatch_level != "token"
        drops = s.rejection != "none" or s.drops_outliers or s.response_region != "none"
        return s.ratio_level != "token" or weighs or drops or self.needs_positions

    @property
    def needs_positions(self) -> bool:
        """`positions`, unless the tokens of each sequence are in order."""
        s = self.settings
        return s.position_weight is not None or s.prefix_budget is not None or s.ratio_level == "prefix_minimum"

    @property
    def needs_statistic(self) -> bool:
        """`with_statistic` before the first micro-batch: a number of the whole batch, see `batch_statistic`."""
        return self.settings.batch_statistic != "none"

    @property
    def moves_without_advantage(self) -> bool:
        """Tokens with A = 0 have a gradient too, so the trainer computes responses without an advantage."""
        s = self.settings
        penalises = "quadratic" in s.control and s.penalty_weight == "one"
        return self.needs_reference or self.needs_entropy or s.rollout_kl != "none" or penalises

    def statistic_sums(
        self, old_logprob: Tensor, rollout_logprob: Tensor, advantage: Tensor, mask: Tensor
    ) -> Float[Tensor, " n"]:
        """Return fp64 sums of tokens [T], to add over the batch; called only where `needs_statistic`."""
        raise NotImplementedError(f"objective {self.name} has needs_statistic, but no statistic_sums")

    def with_statistic(self, sums: Float[Tensor, " n"]) -> ObjectiveProtocol:
        """Return this objective for a batch whose `statistic_sums` add up to `sums`."""
        raise NotImplementedError(f"objective {self.name} has needs_statistic, but no with_statistic")

    def describe(self) -> str:
        """Return the method in words, a few lines, for the top of a log."""
        ...

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
        """Return the loss of each sampled token.

        All [T]. logprob, rollout_logprob, old_logprob, reference_logprob: fp32/fp64 ln p of the sampled token,
        temperature applied. mask: bool or 0/1, tokens that carry loss; values elsewhere, nan included, add nothing to
        loss, gradient or metrics. sequence_ids: numbered from 0 and below T. positions: order within a sequence;
        None = as given. No collectives and no synchronisation with the host.
        """
        ...


FLAGS = tuple(name for name in vars(ObjectiveProtocol) if name.startswith(("needs_", "moves_")))


def missing_attributes(target: Any) -> list[str]:
    """Return the parts of the contract that `target` lacks; the two methods of `needs_statistic` are optional."""
    if isinstance(target, type):
        return ["an instance"]
    wanted = ("name", "settings", "describe", *FLAGS, "__call__")
    return [attribute for attribute in wanted if not hasattr(target, attribute)]
