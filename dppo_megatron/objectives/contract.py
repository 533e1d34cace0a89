"""Define the contract between a trainer and an objective: the call, the output, and the needs that name inputs."""
# mypy: strict-optional=True

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
    """Contains log-probs of the tokens that the rollout policy, or a teacher, found most likely, under both policies.

    ids                  [T, K] int32/int64, global token ids of TopK(mu, K); -1 = absent. No id twice, except
                         that the sampled token may or may not be among them.
    rollout_logprob      [T, K] fp32/fp64, ln mu; of a teacher's list, by the teacher. Ignored where absent.
    logprob              [T, K] fp32/fp64, ln pi. Ignored where absent. Carries a gradient when the method
                         needs one.
    other_logprob        [T] ln of pi's mass outside TopK united with the sampled token, from the kernel. Carries a
                         gradient in a teacher's list.
    target_ids           [T] int, the sampled token.
    vocab_size           size of the whole vocabulary, or [T] of the set each token was drawn from, for the uniform
                         tail of the predictive direction and for score centering with a region in probabilities.
    old_logprob          [T, K] like rollout_logprob, by the old policy (PPO's); only for anchor 'old'.
    old_other_logprob    [T] like other_logprob, by the old policy; None = 1 minus the mass of its top K.

    Example of one token with K = 2: ids [[3, 9]] and target_ids [7], so other_logprob covers all ids but 3, 9 and 7.
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
    """Contains the result of an objective for every token.

    loss [T]: per token, unreduced, with gradient, 0 where mask is False.
    weight [T]: d loss / d z = -A r weight (e_a - pi) for the policy term, r = pi/mu (1 where there is no
    rollout policy), 0 where mask is False. It excludes other terms: KL, entropy, centering, and the penalties of
    the top K and of `penalty`.
    masked_tokens [T] bool: tokens with A != 0 outside the trust region with a gradient that the control removed
    (or, for 'mask_quadratic', penalised), or that the response region dropped.
    divergence [T]: the configured D, 0 where mask is False.
    metrics: name -> Metric. Every call has the same names, and a run logs the metrics under them.
    """

    loss: Float[Tensor, " T"]
    weight: Float[Tensor, " T"]
    masked_tokens: Bool[Tensor, " T"]
    divergence: Float[Tensor, " T"]
    metrics: dict[str, Metric]


class ObjectiveProtocol(Protocol):
    """Declares an objective as the trainer and the integrations use it.

    Each need is a flag that is fixed when the objective is built. A caller passes the inputs that the needs name and
    may omit all other inputs. A class that inherits from this class or from `Objective` derives every need from its
    settings. The class may replace a need by an attribute, e.g. `needs_entropy = True`.
    """

    name: str
    settings: ObjectiveSettings
    # Columns of `types.COLUMNS` that the engine must return, each an argument with its name, as in the `TokenBatch`.
    needs_columns: tuple[str, ...] = ()

    @property
    def needs_rollout(self) -> bool:
        """Return whether the objective needs `rollout_logprob`, ln mu(a) by the rollout policy."""
        s = self.settings
        corrects = s.mismatch != "none" or s.rejection != "none" or s.drops_outliers
        compares = s.response_region != "none" or s.rollout_kl != "none" or s.batch_statistic != "none"
        anchored = s.has_region and s.anchor == "rollout"
        return not s.supervised and (s.importance == "rollout" or corrects or compares or s.reads_topk or anchored)

    @property
    def needs_old(self) -> bool:
        """Return whether the objective needs `old_logprob`, computed with the weights before the step.

        A top-K method then also needs `topk.old_logprob`.
        """
        s = self.settings
        return s.importance == "old" or (s.has_region and s.anchor == "old") or s.batch_statistic != "none"

    @property
    def needs_reference(self) -> bool:
        """Return whether the objective needs `reference_logprob`, by the model from which training starts."""
        return self.settings.reference_kl != "none"

    @property
    def needs_topk(self) -> bool:
        """Return whether the objective needs `topk`: the engine's list of likely tokens, scored by the trainer."""
        return self.settings.reads_topk

    @property
    def needs_topk_gradient(self) -> bool:
        """Return whether the objective needs `topk.logprob` with a gradient."""
        s = self.settings
        penalises = s.rollout_kl == "topk_squared" or (s.divergence == "topk_tv" and "quadratic" in s.control)
        return penalises or s.centering != "none"

    @property
    def needs_teacher(self) -> bool:
        """Return whether the objective needs `teacher_logprob` and `teacher`, a teacher's list, with a gradient."""
        return self.settings.distillation != "none"

    @property
    def needs_entropy(self) -> bool:
        """Return whether the objective needs `entropy` with a gradient. Otherwise it may be passed as a metric."""
        return self.settings.entropy_coefficient > 0

    @property
    def needs_sequences(self) -> bool:
        """Return whether the objective needs `sequence_ids`, and each complete sequence in one call."""
        s = self.settings
        weighs = s.mismatch != "none" and s.mismatch_level != "token"
        drops = s.rejection != "none" or s.drops_outliers or s.response_region != "none"
        return s.ratio_level != "token" or weighs or drops or self.needs_positions

    @property
    def needs_positions(self) -> bool:
        """Return whether the objective needs `positions`, unless the tokens of each sequence are in order."""
        s = self.settings
        return s.position_weight is not None or s.prefix_budget is not None or s.ratio_level == "prefix_minimum"

    @property
    def needs_statistic(self) -> bool:
        """Return whether the objective first needs `with_statistic`, a number of the batch (`batch_statistic`)."""
        return self.settings.batch_statistic != "none"

    @property
    def moves_without_advantage(self) -> bool:
        """Return whether tokens with A = 0 have a gradient too, so that responses without advantage are computed."""
        s = self.settings
        penalises = "quadratic" in s.control and s.penalty_weight == "one"
        return self.needs_reference or self.needs_teacher or self.needs_entropy or s.rollout_kl != "none" or penalises

    def at_step(self, step: int) -> ObjectiveProtocol:
        """Return this objective for the training step `step`, from 0; called only if `needs_teacher`."""
        return self

    def statistic_sums(
        self, old_logprob: Tensor, rollout_logprob: Tensor, advantage: Tensor, mask: Tensor, **extra: Tensor
    ) -> Float[Tensor, " n"]:
        """Return fp64 sums of tokens [T], to add over the batch; called only if `needs_statistic`.

        advantage: as in the call. extra: `teacher_logprob`, passed only if `needs_teacher`.
        """
        raise NotImplementedError(f"objective {self.name} sets needs_statistic; implement statistic_sums")

    def with_statistic(self, sums: Float[Tensor, " n"]) -> ObjectiveProtocol:
        """Return this objective for a batch with the total `sums` of `statistic_sums`."""
        raise NotImplementedError(f"objective {self.name} sets needs_statistic; implement with_statistic")

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
        teacher: TopKLogprobs | None = None,
        teacher_logprob: Float[Tensor, " T"] | None = None,
        old_logprob: Float[Tensor, " T"] | None = None,
        sequence_ids: Int[Tensor, " T"] | None = None,
        reference_logprob: Float[Tensor, " T"] | None = None,
        entropy: Float[Tensor, " T"] | None = None,
        positions: Int[Tensor, " T"] | None = None,
    ) -> ObjectiveOutput:
        """Return the loss of each sampled token.

        All [T]. logprob and rollout_, old_, reference_, teacher_logprob: fp32/fp64 ln p of the sampled token,
        temperature applied. mask: bool or 0/1, tokens that carry loss; other values, nan included, add nothing to loss,
        gradient or metrics. sequence_ids: numbered from 0 and below T. positions: order within a sequence; None = the
        order of the tokens. `needs_columns` are further arguments. The call runs no collectives and does not
        synchronise with the host.
        """
        ...


FLAGS = tuple(name for name, value in vars(ObjectiveProtocol).items() if isinstance(value, property))


def missing_attributes(target: Any) -> list[str]:
    """Return the parts of the contract that `target` lacks; the two methods for `needs_statistic` are optional."""
    if isinstance(target, type):
        return ["an instance"]
    required = ("name", "settings", "describe", "needs_columns", *FLAGS, "__call__")
    return [attribute for attribute in required if not hasattr(target, attribute)]
