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
    """Contains log-probs, under both policies, of the tokens that the rollout policy or a teacher found most likely.

    ids                  [T, K] int32/int64, global token ids of TopK(mu, K); -1 = absent. No id occurs twice. The
                         sampled token may be listed.
    rollout_logprob      [T, K] fp32/fp64, ln mu; in a teacher's list, the teacher's log-prob. Ignored where absent.
    logprob              [T, K] fp32/fp64, ln pi. Ignored where absent. Carries a gradient if the method needs it.
    other_logprob        [T] ln of pi's mass outside TopK and the sampled token, from the kernel. Carries a gradient
                         in a teacher's list.
    target_ids           [T] int, the sampled token.
    vocab_size           vocabulary size, or [T] size of each token's sampling mask. Used for the uniform tail of
                         direction 'predictive', and for score centering with a region in probabilities.
    old_logprob          [T, K] like rollout_logprob, by the old policy (PPO's); only for anchor 'old'.
    old_other_logprob    [T] like other_logprob, by the old policy; None = ln(1 - its mass on the listed and sampled
                         tokens).

    Example with K = 2: ids [[3, 9]] and target_ids [7], so other_logprob covers all ids but 3, 9 and 7.
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
    """Contains an objective's result for every token.

    loss [T]: per token, unreduced, with gradient, 0 where mask is False.
    weight [T]: d loss / d z = -A r weight (e_a - pi) for the policy term, 0 where mask is False. r = pi/mu; it is
        pi/old without rollout log-probs, and 1 without an importance ratio. Other terms do not count: KL, entropy,
        centering, and penalties in `Controlled.penalty`.
    masked_tokens [T] bool: tokens with A != 0 that the control masked (or, for 'mask_quadratic', penalized) outside
        the trust region, or that the response region or M2PO's batch budget dropped.
    divergence [T]: the configured D, 0 where mask is False.
    metrics: name in the log -> Metric. Every call returns equal names.
    """

    loss: Float[Tensor, " T"]
    weight: Float[Tensor, " T"]
    masked_tokens: Bool[Tensor, " T"]
    divergence: Float[Tensor, " T"]
    metrics: dict[str, Metric]


class ObjectiveProtocol(Protocol):
    """Declares an objective as the trainer and the integrations use it.

    The needs are flags, fixed when the objective is built. A caller passes the inputs that the needs name and may omit
    all other inputs. A class that inherits from this class or from `Objective` derives every need from `settings`. The
    class may replace a need by an attribute, e.g. `needs_entropy = True`.
    """

    name: str
    settings: ObjectiveSettings
    # Names in `types.COLUMNS` that the engine must return. Each is also an argument of the call, as in `TokenBatch`.
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
        """Return whether the objective needs `sequence_ids`, with every sequence complete in the call."""
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
        """Return whether a caller must first pass a batch statistic (`batch_statistic`) to `with_statistic`."""
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
        """Return fp64 sums over the tokens [T], to add over the batch; called only if `needs_statistic`.

        advantage: as in the call. extra: `teacher_logprob`, passed only if `needs_teacher`.
        """
        raise NotImplementedError(f"objective {self.name} sets needs_statistic; implement statistic_sums")

    def with_statistic(self, sums: Float[Tensor, " n"]) -> ObjectiveProtocol:
        """Return this objective for a batch; `sums` adds up all results of `statistic_sums`."""
        raise NotImplementedError(f"objective {self.name} sets needs_statistic; implement with_statistic")

    def describe(self) -> str:
        """Describe the method in a few lines, for the top of a log."""
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
        """Return the loss of each sampled token. All tensors are [T].

        logprob and rollout_, old_, reference_, teacher_logprob: fp32/fp64 ln p(sampled token), temperature applied.
        mask: bool or 0/1, tokens that carry loss. Values at other tokens, nan included, do not affect loss, gradient or
            metrics.
        sequence_ids: numbered from 0 and below T.
        positions: order within a sequence; None = the token order.
        `needs_columns` are further arguments. The call runs no collectives and does not synchronize with the host.
        """
        ...


FLAGS = tuple(name for name, value in vars(ObjectiveProtocol).items() if isinstance(value, property))


def missing_attributes(target: Any) -> list[str]:
    """Return the contract parts that `target` lacks; the two methods for `needs_statistic` are optional."""
    if isinstance(target, type):
        return ["an instance"]
    required = ("name", "settings", "describe", "needs_columns", *FLAGS, "__call__")
    return [attribute for attribute in required if not hasattr(target, attribute)]
