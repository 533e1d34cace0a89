"""Wrong versions of the formulas, each one sign, bound or detach away from the right one, and what must notice it.

    python -m tests.objectives.mutations    # prints the list

A mutation replaces the code of one function by that of its changed source, in every place that holds the function.
"""

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch

from dppo_megatron import objectives
from tests.objectives import test_objective_advantages as by_hand
from tests.objectives.centred import VOCAB, dense_gradient, given, gradient_through_kernels
from tests.objectives.published_axes import check

SEEDS = range(6)


def _turns() -> None:
    mark = next(m for m in by_hand.test_turns_are_compared_with_those_of_the_same_number.pytestmark)
    for kind, expected in mark.args[1]:
        by_hand.test_turns_are_compared_with_those_of_the_same_number(kind, expected)


TABLES = {
    "advantages": by_hand.test_kinds_by_their_formulas,
    "aggregation": by_hand.test_sequences_without_loss_count_nowhere,
    "turns": _turns,
}


@dataclass(frozen=True)
class Mutation:
    """`old` stands once in the source of `function`; `noticed_by` is a label of published_axes.py, centred.py or
    `TABLES`."""

    module: ModuleType
    function: str
    old: str
    new: str
    noticed_by: str

    def __str__(self) -> str:
        where = f"{self.module.__name__.rpartition('.')[2]}.{self.function}"
        return f"{where:44} {self.old!r} -> {self.new!r}   ({self.noticed_by})"


def _in(module: ModuleType, *rows: tuple[str, str, str, str]) -> list[Mutation]:
    return [Mutation(module, *row) for row in rows]


MUTATIONS = [
    *_in(
        objectives.controls,
        ("sigmoid_gate", "* sigma * rest", "* sigma * sigma", "sapo"),
        ("sigmoid_gate", "s.gate_positive, s.gate_negative", "s.gate_negative, s.gate_positive", "sapo"),
        ("sigmoid_gate", "sigma * 4 / tau", "sigma * 4 * tau", "sapo"),
        ("gaussian_gate", "at.advantage * (r - 1) > 0", "at.advantage * (r - 1) < 0", "maspo"),
        ("gaussian_gate", "1 + s.gate_positive", "1 - s.gate_positive", "maspo"),
        ("gaussian_gate", "2 * sigma**2", "sigma**2", "maspo"),
        ("gaussian_gate", "clamp(s.gate_width, s.gate_width_max)", "clamp(min=s.gate_width)", "maspo_narrow"),
        ("gaussian_gate", "at.base", "at.anchor", "maspo_old"),
        ("inverse_gate", "r > 1 + s.epsilon_high, r < 1", "r > 1 + s.epsilon_high, r > 1", "aspo"),
        ("inverse_gate", "1 / bounded, bounded", "bounded, bounded", "aspo"),
        ("inverse_gate", ".clamp(max=s.dual_clip)", "", "aspo"),
        ("gamma_gate", "- decay * bounded)", "+ decay * bounded)", "vespo"),
        ("gamma_gate", "power * bounded.log()", "bounded.log()", "vespo"),
        ("_by_sign", "at.advantage > 0", "at.advantage < 0", "sapo"),
    ),
    *_in(
        objectives.trust_region,
        ("beyond_threshold", "where(ratio < 1", "where(ratio > 1", "delta_low"),
        ("beyond_threshold", "weighted > threshold", "divergence > threshold", "cppo_tight"),
        ("position_weights", "(1 - min_weight)", "min_weight", "cppo_tight"),
        ("beyond_threshold", "1 - (s.free_low or 0)", "1", "bandpo_relaxed"),
        ("beyond_threshold", "1 + (s.free_high or 0)", "1", "bandpo_relaxed"),
        ("prefix_allowance", "s.prefix_budget_ceiling or 2", "2", "cppo_ceiling"),
        ("position_weights", "(length - 1)", "length", "cppo_tight"),
        ("prefix_allowance", "- sum_before(weight * div", "+ sum_before(weight * div", "cppo_tight"),
        ("prefix_allowance", "clamp(s.prefix_budget, max_budget)", "clamp(min=s.prefix_budget)", "cppo_tight"),
        ("prefix_allowance", "divergence, 0.9", "divergence, 0.5", "cppo_tight"),
        ("beyond_threshold", "torch.minimum(threshold, threshold + prefix", "(threshold + prefix", "cppo_middle"),
        ("exempt", "< s.exempt_below", "> s.exempt_below", "dppo_relaxed"),
        ("exempt", '== "low"', '== "high"', "exempt_low"),
        ("exempt", "rare & (", "rare | (", "exempt_low"),
    ),
    *_in(
        objectives.sequences,
        ("sum_before", "- units", "", "cppo_tight"),
        ("sum_before", "prefix_sums - prefix_sums[first]", "prefix_sums", "cppo_tight"),
        ("least_before", "place > first, prefix_min", "place >= first, prefix_min", "minpro"),
        ("least_before", "torch.minimum", "torch.maximum", "minpro"),
        ("largest_of_sequence", "amax", "amin", "trm_max"),
        ("quantile_of_sequence", "first + high", "first + low", "cppo_middle"),
    ),
    *_in(
        objectives.trust_region,
        ("_diverging", '== "negative" else', '== "positive" else', "negative_tight"),
        ("_diverging", "raises < 0", "raises > 0", "negative_tight"),
        ("_diverging", "(advantage > 0) & (raises > 0)", "(advantage > 0)", "binary_tv"),
        ("locate", "& ~exempt", "& exempt", "exempt_high"),
        ("ratio_to", 'mean=s.ratio_level == "sequence"', "mean=True", "vespo"),
        ("ratio_to", 'mean=s.ratio_level == "sequence"', "mean=False", "gspo_wide"),
        ("ratio_to", "log_ratio + torch.where", "log_ratio - torch.where", "minpro"),
    ),
    *_in(
        objectives.policy_term,
        ("truncated", "advantage < 0", "advantage > 0", "topr"),
        ("truncated", "ratio.clamp(*negative_bounds(s))", "ratio", "dispo"),
        ("truncated", "torch.minimum", "torch.maximum", "ess_adaptive"),
        ("term_value", "-slope", "slope", "vespo"),
        ("term_value", "(tokens.advantage != 0)", "0", "binary_tv"),
        ("join", "return value - slope", "return value + slope", "binary_tv"),
        ("term_slope", "advantage)", "-advantage)", "binary_tv"),
        ("policy_term", 's.path == "ratio"', 's.path != "ratio"', "score_centering_tis"),
    ),
    *_in(
        objectives.controls,
        ("dppo_mask", "at.exceeds & at.diverging", "at.exceeds", "cppo_tight"),
        ("dppo_mask", "torch.where(outside, 0.0, r)", "torch.where(outside, 1.0, r)", "binary_tv"),
        ("dppo_mask", "(~outside)", "(outside)", "topk_kl"),
        ("ppo_clip", "at.advantage < 0", "at.advantage > 0", "dual_clip"),
        ("ppo_clip", "outside | runaway", "outside", "dual_clip"),
        ("ppo_clip", "(at.ratio > s.dual_clip)", "(at.ratio < s.dual_clip)", "dual_clip"),
        ("ppo_clip", "torch.where(runaway, s.dual_clip, clipped)", "clipped", "dual_clip"),
        ("_penalised", "pi * at.shift.sign()", "at.shift.sign()", "penalty_tv"),
        ("_penalised", "mu_rest / pi_rest - 1", "1 - mu_rest / pi_rest", "penalty_kl"),
        ("_penalised", "at.ratio - 1 - at.ratio.log(), at.ratio - 1", "at.ratio - 1, at.ratio", "penalty_k3"),
        ("_penalised", "0.5 * mu", "mu", "penalty_l2"),
        ("_penalised", "torch.where(only, scale, torch.zeros_like(scale))", "scale", "penalty_outside"),
        ("_penalised", '== "advantage"', '!= "advantage"', "penalty_tv"),
    ),
    *_in(
        objectives.trust_region,
        ("outside_response_region", "mean=True", "mean=False", "trm_mean"),
        ("outside_response_region", "> s.response_delta", "< s.response_delta", "flash_reinforce"),
        ("outside_response_region", "tokens.advantage < 0", "tokens.advantage > 0", "opsm"),
        ("outside_response_region", "tokens.rollout_logprob) > 0", "tokens.rollout_logprob) < 0", "vaco"),
    ),
    *_in(
        objectives.divergence,
        ("token_divergence", "-log_ratio,", "log_ratio,", "opsm"),
        ("token_divergence", "0.5 * log_ratio", "log_ratio", "response_k2"),
        ("token_divergence", "torch.expm1(log_ratio) - log_ratio", "torch.expm1(log_ratio) + log_ratio", "trm_mean"),
        ("token_divergence", "torch.expm1(log_ratio).abs()", "torch.expm1(log_ratio)", "vaco"),
        ("topk_tv", "0.5 *", "1.0 *", "response_topk"),
        ("topk_tv", "buckets.policy_other_logprob.exp() -", "0 * buckets.policy_other_logprob.exp() -", "topk_tv"),
        ("binary_tv", "policy.exp() - anchor.exp()", "policy - anchor", "binary_tv"),
        ("binary_tv", ".abs()", "", "binary_tv"),
        ("binary_kl", "inside + outside", "inside", "binary_kl"),
        ("binary_kl", "log1mexp(mu_rest) - log1mexp(pi_rest)", "log1mexp(pi_rest) - log1mexp(mu_rest)", "binary_kl"),
        ("binary_kl", "-torch.expm1(mu_rest)", "-torch.expm1(pi_rest)", "binary_kl"),
        ("binary_kl", "anchor.exp(), anchor, policy", "policy.exp(), policy, anchor", "binary_kl"),
        ("topk_kl", "inside + rest", "inside", "topk_kl"),
        ("token_divergence", "binary_kl(policy, anchor)", "binary_kl(anchor, policy)", "kpop"),
        (
            "topk_kl",
            "buckets.anchor, buckets.anchor_logprob",
            "buckets.policy.detach(), buckets.anchor_logprob",
            "topk_kl",
        ),
    ),
    *_in(
        objectives.corrections,
        ("rejected", "dropped | _any_outside", "dropped & _any_outside", "rejections"),
        ("_any_outside", "> 0", "> 1", "rejections"),
        ("_expected_square", "buckets.anchor * gap", "buckets.policy * gap", "distributional_ipo"),
        ("_expected_square", "mass - mass.detach()", "mass.detach() - mass", "distributional_ipo"),
        ("_expected_square", "inside + outside", "inside", "distributional_ipo"),
        ("rollout_kl", "log_ratio.square()", "log_ratio", "rollout_kl"),
        ("_k3", "torch.expm1((-log_ratio)", "torch.expm1((log_ratio)", "ess_adaptive"),
        ("rollout_kl", "tokens.logprob -", "tokens.detached_logprob -", "rollout_kl"),
    ),
    *_in(
        objectives.batch_statistic,
        ("statistic_value", "budget * counts.clamp", "2 * budget * counts.clamp", "m2po"),
        ("statistic_value", "total * total", "total", "ess_adaptive"),
        ("statistic_value", "edges * (", "2 * edges * (", "m2po_clip"),
        ("beyond_budget", "(log_ratio < _KEPT[0]) |", "", "m2po_clip"),
        ("beyond_budget", "exceeds & (", "(", "m2po_clip"),
        ("beyond_budget", ">= cut", "> cut", "m2po"),
        ("_moving_away", "> 0", "< 0", "m2po"),
        ("statistic_sums", "mask & _moving_away(log_ratio, advantage)", "mask", "m2po"),
    ),
    *_in(
        objectives.advantages,
        ("_centred", "mean = ", "mean = 0 * ", "advantages"),
        ("group_advantages", "keepdim=True) / (count - 1)", "keepdim=True) / count", "advantages"),
        ("group_advantages", "torch.where(signal, std, torch.ones_like(std))", "torch.ones_like(std)", "advantages"),
        ("group_advantages", "centred * count", "centred * (count + 1)", "advantages"),
        ("group_advantages", '== "batch_mean"', '== ""', "advantages"),
        ("reward_moments", "centred.square()", "centred.abs()", "advantages"),
        ("turn_advantages", "earned[:, :, k] + discount", "earned[:, :, k] - discount", "turns"),
        ("turn_advantages", "counts = valid_turns[:, :, k]", "counts = valid_turns[:, :, 0]", "turns"),
    ),
    *_in(
        objectives.aggregation,
        ("sequence_weights", "max(int(response_lengths.sum()), 1)", "len(lengths)", "aggregation"),
        ("sequence_weights", "1 / max(int((response_lengths > 0).sum()), 1)", "1 / len(lengths)", "aggregation"),
        ("sequence_weights", "weights / lengths", "weights * lengths", "aggregation"),
        ("sequence_weights", "weights / horizon", "weights", "aggregation"),
        ("sequence_weights", "torch.where(response_lengths > 0, weights, 0.0)", "weights", "aggregation"),
    ),
    *_in(
        objectives.objective.Objective,
        ("__call__", "1 - effective_size", "1 + effective_size", "ess_adaptive"),
        ("__call__", "loss + tokens.advantage *", "loss - tokens.advantage *", "score_centering"),
        ("_outside_region", "outside | (beyond", "outside & (beyond", "m2po"),
    ),
    *_in(
        objectives.centering,
        ("expected_score", "- alpha[:, None] * pi", "+ alpha[:, None] * pi", "centred alone"),
        ("expected_score", "mu_tail / pi_tail", "pi_tail / mu_tail", "centred tis"),
        ("expected_score", "mu_tail / tail_tokens", "mu_tail", "centred tis"),
        ("expected_score", "(topk.vocab_size - present", "(1 - present", "centred dppo"),
        ("expected_score", "weights[:, :-1], mu", "weights[:, :-1], pi", "centred tis"),
        ("expected_score", "coefficients * policy)", "coefficients * policy.detach())", "centred alone"),
        ("expected_score", "torch.where(sampled_in_topk, 0.0", "torch.where(~sampled_in_topk, 0.0", "centred alone"),
        ("_coefficients", "product(weight, correction)", "weight", "centred icepop"),
        (
            "_coefficients",
            "repeated(tokens.advantage.double())",
            "-repeated(tokens.advantage.double())",
            "centred dppo",
        ),
        ("_coefficients", "product(term.used_ratio", "product(term.ratio", "centred tis"),
    ),
]


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """Inside, the function has the changed source. Raises ValueError unless `old` occurs once in the source."""
    function = inspect.unwrap(getattr(mutation.module, mutation.function))
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mutation.old) != 1:
        raise ValueError(f"{mutation}: stands {source.count(mutation.old)} times in the source")
    scope = dict(function.__globals__)
    exec(
        compile("from __future__ import annotations\n" + source.replace(mutation.old, mutation.new), "mutated", "exec"),
        scope,
    )
    changed, before = inspect.unwrap(scope[mutation.function]).__code__, function.__code__
    function.__code__ = changed
    try:
        yield
    finally:
        function.__code__ = before


def notice(what: str) -> None:
    """Raises AssertionError where a world, a kind of centering or a table no longer agrees with what is written for
    it."""
    if what in TABLES:
        TABLES[what]()
        return
    if what.startswith("centred "):
        kind = what.removeprefix("centred ")
        g = given(6)
        gradient, _ = gradient_through_kernels(g, kind, torch.float64)
        assert (gradient[:, :VOCAB] - dense_gradient(g, kind)).abs().max() < 1e-9, what
        return
    for seed in SEEDS:
        check(what, seed)


def survives(mutation: Mutation, check: Callable[[str], None] = notice) -> bool:
    """Whether the changed formula goes unnoticed. An error of any other kind does not count as noticing."""
    with applied(mutation):
        try:
            check(mutation.noticed_by)
        except AssertionError:
            return False
    return True


if __name__ == "__main__":
    for mutation in MUTATIONS:
        print("SURVIVES" if survives(mutation) else "noticed ", mutation)
