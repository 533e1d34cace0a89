"""Define the papers' methods as data: name, axes, and the published advantage and aggregation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .settings import ObjectiveSettings as S


@dataclass(frozen=True)
class Preset:
    """Contains a method with the advantage and aggregation that the paper uses.

    `advantage` and `aggregation` are advice for the run's configuration; the objective does not apply them.
    """

    settings: S
    summary: str
    source: str
    advantage: str = "group_mean"
    aggregation: str = "seq_mean_token_sum_norm"


_DPPO, _DRPO, _SPO = "DPPO, arXiv 2602.04879", "DRPO, arXiv 2606.09821", "SPO, arXiv 2401.16025"
_SC = "score centering, arXiv 2609.20807"
_TRM = "trust region masking, arXiv 2512.23075"
_STD_TOKENS, _STD_SEQUENCES = ("group_mean_std", "token_mean"), ("group_mean_std", "seq_mean_token_mean")


def _ratio(low: float = 0.2, high: float = 0.2, **axes: Any) -> S:
    return S(divergence="ratio", epsilon_low=low, epsilon_high=high, **axes)


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "dppo_binary_tv": Preset(
            S(divergence="binary_tv", delta=0.15), "mask by the shift of the sampled token's probability", _DPPO
        ),
        "dppo_binary_kl": Preset(
            S(divergence="binary_kl", delta=0.05), "mask by the KL of the sampled token against all others", _DPPO
        ),
        "dppo_topk_tv": Preset(
            S(divergence="topk_tv", delta=0.15), "mask by total variation over the rollout's top K", _DPPO
        ),
        "dppo_topk_kl": Preset(S(divergence="topk_kl", delta=0.05), "mask by KL over the rollout's top K", _DPPO),
        "dppo_predictive": Preset(
            S(divergence="topk_tv", direction="predictive", delta=0.15),
            "mask where the update would raise the divergence further; the gate here is on TV",
            "predictive masks, arXiv 2607.10848",
        ),
        "ipo": Preset(
            S(divergence="binary_tv", direction="symmetric", delta=0.15),
            "mask by the shift of the probability, for either sign of the advantage",
            "symmetric variant of the DPPO mask",
        ),
        "drpo": Preset(
            S(divergence="binary_tv", control="quadratic", delta=12.5),
            "quadratic penalty on the shift, as published: weight within [0.92, 1.08]",
            _DRPO,
        ),
        "drpo_tr": Preset(
            S(divergence="binary_tv", control="quadratic", delta=0.2),
            "DRPO with a delta that acts as a trust region: weight 0 at a shift of 0.2, corrective beyond it",
            _DRPO,
        ),
        "mask_drpo": Preset(
            S(divergence="binary_tv", control="mask_quadratic", delta=0.15, penalty_delta=12.5),
            "DRPO's penalty, only outside DPPO's region",
            _DRPO,
        ),
        "spo": Preset(_ratio(control="quadratic"), "quadratic penalty on the ratio", _SPO),
        "ppo": Preset(_ratio(), "clip of the ratio", "PPO, arXiv 1707.06347 eq. 7", aggregation="token_mean"),
        "ppo_dual_clip": Preset(
            _ratio(dual_clip=3.0),
            "PPO, and no gradient where A < 0 and r > 3",
            "dual-clip PPO, arXiv 1912.09729 eq. 4",
            aggregation="token_mean",
        ),
        "grpo": Preset(
            _ratio(), "PPO's clip with group-relative advantages", "GRPO, arXiv 2402.03300 eq. 3", *_STD_SEQUENCES
        ),
        "grpo_clip_higher": Preset(
            _ratio(0.2, 0.28), "GRPO with a wider upper bound", "clip-higher of DAPO, arXiv 2503.14476", *_STD_SEQUENCES
        ),
        "dapo": Preset(
            _ratio(0.2, 0.28),
            "clip-higher with a token-level mean; the paper adds a soft overlong penalty and dynamic sampling",
            "DAPO, arXiv 2503.14476 eq. 8",
            *_STD_TOKENS,
        ),
        "minirl": Preset(
            _ratio(0.2, 0.27, anchor="old", gradient_path="logprob"),
            "clip of pi over the old policy, importance ratio to the rollout policy",
            "MiniRL, arXiv 2512.01374",
        ),
        "minirl_tis": Preset(
            _ratio(0.2, 0.27, anchor="old", ratio_cap=3.0), "MiniRL with a truncated importance ratio", _DPPO
        ),
        "cispo": Preset(
            S(control="none", ratio_floor=0.0, ratio_cap=5.0),
            "no trust region; the ratio is clipped to [1 - 1, 1 + 4] and detached",
            "CISPO, arXiv 2506.13585 eq. 4",
            *_STD_TOKENS,
        ),
        "pg_is": Preset(S(control="none"), "importance-weighted policy gradient, no trust region", _DPPO),
        "pg_tis": Preset(
            S(control="none", ratio_cap=3.0), "pg_is with the ratio truncated at 3 (the DPPO paper's 'CISPO')", _DPPO
        ),
        "gspo": Preset(
            _ratio(3e-4, 4e-4, ratio_level="sequence"),
            "clip of the geometric mean of the ratio over the response",
            "GSPO, arXiv 2507.18071 eq. 5-7",
            *_STD_SEQUENCES,
        ),
        "dppo_predictive_kl": Preset(
            S(divergence="topk_kl", direction="predictive", delta=0.05),
            "dppo_predictive with the published gate: the KL, the change of which is predicted, not TV",
            "predictive masks, arXiv 2607.10848",
        ),
        "dppo_negative_only": Preset(
            S(divergence="binary_tv", direction="negative", delta=0.5),
            "the smallest mask that kept training stable: only where A < 0 and mu - pi > 0.5",
            _DPPO,
        ),
        "dppo_relaxed": Preset(
            S(divergence="binary_tv", delta=0.15, exempt_below=0.1),
            "DPPO without a region for tokens that had a probability below 0.1 in the engine",
            _DPPO,
        ),
        "ipo_cap": Preset(
            S(divergence="binary_tv", direction="symmetric", delta=0.3, ratio_cap=1e4, gradient_path="through"),
            "the loss of prime-rl: mask by the shift for either sign of A, ratio capped at 1e4",
            "prime-rl 0.8, loss type ipo",
            aggregation="token_mean",
        ),
        "distributional_ipo": Preset(
            S(
                divergence="topk_tv",
                direction="symmetric",
                delta=0.3,
                rollout_kl="topk_squared",
                rollout_kl_coefficient=1e-3,
            ),
            "mask by total variation over the top K for either sign of A, and a penalty on (ln r)^2 over the top K",
            "prime-rl, loss type distributional_ipo; our coefficient",
            aggregation="token_mean",
        ),
        "kpop": Preset(
            S(divergence="kl_either", direction="symmetric", delta=0.1),
            "mask by the binary KL in both directions, for either sign of A",
            "KPop (Ant Group, 2026), as in prime-rl's loss type kpop",
            aggregation="token_mean",
        ),
        "bandpo_tv": Preset(
            S(divergence="binary_tv", delta=0.05),
            "clip to the band of a TV ball, 1 +- delta / mu, which equals DPPO's mask",
            "BandPO, arXiv 2603.04918",
            *_STD_SEQUENCES,
        ),
        "cppo": Preset(
            S(divergence="binary_tv", delta=0.2, position_weight=0.8, prefix_budget=0.02),
            "DPPO that is stricter early in a response and has a budget for the drift of the prefix",
            "CPPO, arXiv 2606.10968 eq. 8-11",
        ),
        "score_centering": Preset(
            S(control="none", importance="none", centering="policy"),
            "no ratio, no region: subtracts the score that the engine expects from the score of every token",
            _SC,
            aggregation="token_mean",
        ),
        "score_centering_tis": Preset(
            S(control="none", ratio_cap=2.0, centering="policy"),
            "score centering with a truncated ratio, better for stale rollouts",
            _SC,
            aggregation="token_mean",
        ),
        "vaco": Preset(
            _ratio(
                0.2,
                0.272,
                response_region="mean",
                response_divergence="ratio",
                response_delta=0.2,
                response_sign="harmful",
            ),
            "GRPO's clip; drops tokens that diverge further in responses with a mean |r - 1| above 0.2",
            "VACO, arXiv 2603.01365; region and clip of open-instruct, our threshold",
            *_STD_TOKENS,
        ),
        "trm_max": Preset(
            S(control="none", response_region="max", response_divergence="k3", response_delta=0.05),
            "drop responses in which any token has a k3 above 0.05",
            f"{_TRM}; our threshold",
        ),
        "trm_mean": Preset(
            S(control="none", response_region="mean", response_divergence="k3", response_delta=0.001),
            "drop responses with a mean k3 above 0.001",
            f"{_TRM}; our threshold",
        ),
        "opsm": Preset(
            _ratio(response_region="mean", response_divergence="k1", response_delta=0.5, response_sign="negative"),
            "GRPO's clip; drops responses with A < 0 and a mean ln(mu / pi) above 0.5",
            "off-policy sequence masking of DeepSeek-V3.2, arXiv 2512.02556; threshold of TRL",
            *_STD_SEQUENCES,
        ),
        "flash_reinforce": Preset(
            S(
                control="none",
                gradient_path="logprob",
                response_region="mean",
                response_divergence="binary_kl",
                response_delta=3e-3,
            ),
            "detached ratio without a bound; drops responses with a mean binary KL above 0.003",
            "FlashREINFORCE, its code of September 2026",
            advantage="batch_mean",
            aggregation="seq_mean_token_mean",
        ),
        "rollout_kl": Preset(
            S(control="none", importance="none", rollout_kl="squared", rollout_kl_coefficient=0.05),
            "no ratio, no region: a penalty on (ln r)^2 of every token keeps the policy near the engine's",
            "DRO as in verl (half its beta); Kimi K2.5, arXiv 2602.02276; our coefficient",
            aggregation="token_mean",
        ),
        "sapo": Preset(
            S(control="gate", gate="sigmoid", gate_positive=1.0, gate_negative=1.05),
            "a sigmoid of the ratio in place of the clip, steeper where A < 0",
            "SAPO, arXiv 2511.20347",
            *_STD_SEQUENCES,
        ),
        "vespo": Preset(
            S(
                control="gate",
                gate="gamma",
                gate_positive=3.0,
                gate_negative=2.0,
                gate_power_positive=2.0,
                gate_power_negative=3.0,
                ratio_level="product",
                gradient_path="logprob",
            ),
            "a smooth kernel of the whole response's ratio, without a length bias",
            "VESPO, arXiv 2602.10693 section 3.4, bounds of TRL",
            *_STD_TOKENS,
        ),
        "maspo": Preset(
            S(
                control="gate",
                gate="gaussian",
                gate_positive=0.03,
                gate_negative=0.03,
                gate_width=1.0,
                gate_width_max=10.0,
                gate_mass_power=0.3,
            ),
            "a Gaussian of the ratio where it diverges; rare tokens and the advantage widen it",
            "MASPO, arXiv 2602.17550, values of its code",
            *_STD_TOKENS,
        ),
        "aspo": Preset(
            S(control="gate", gate="inverse", epsilon_low=0.2, epsilon_high=0.2, dual_clip=3.0),
            "the inverse of the ratio where A > 0, with a soft dual clip for both signs",
            "ASPO, arXiv 2510.06062",
            *_STD_TOKENS,
        ),
        "topr": Preset(
            S(
                control="none",
                ratio_level="product",
                ratio_floor=1.0,
                ratio_cap=1.0,
                ratio_floor_negative=0.0,
                ratio_cap_negative=1.0,
            ),
            "no ratio where A > 0; the response's ratio, at most 1, where A < 0",
            "TOPR, arXiv 2503.14286",
            aggregation="seq_mean_token_sum",
        ),
        "dispo": Preset(
            S(control="none", ratio_floor=0.0, ratio_cap=5.0, ratio_floor_negative=0.5, ratio_cap_negative=2.0),
            "CISPO with separate bounds where A < 0",
            "DISPO, arXiv 2602.00983; our four bounds",
            *_STD_TOKENS,
        ),
        "seq_tis": Preset(
            S(control="none", ratio_level="product", ratio_cap=2.0),
            "the ratio of the whole response, truncated at 2",
            "sequence TIS, https://richardli.xyz/rl-collapse; threshold of verl",
            aggregation="seq_mean_token_sum",
        ),
        "seq_mis": Preset(
            S(control="none", ratio_level="product", gradient_path="logprob", rejection="sequence", rejection_high=2.0),
            "the ratio of the whole response; drops responses with a ratio above 2",
            "sequence MIS, https://richardli.xyz/rl-collapse; threshold of verl",
            aggregation="seq_mean_token_sum",
        ),
        "minpro": Preset(
            _ratio(0.2, 0.28, ratio_level="prefix_minimum"),
            "clip of the ratio times the least ratio before it in the response",
            "MinPRO, arXiv 2601.22718",
            *_STD_TOKENS,
        ),
        "m2po": Preset(
            S(control="none", batch_statistic="second_moment", second_moment_budget=0.04),
            "drops the tokens that move away with the largest |ln r| until the batch mean of its square is below 0.04",
            "M2PO, arXiv 2510.01161",
            *_STD_TOKENS,
        ),
        "ess_adaptive": Preset(
            S(control="none", batch_statistic="effective_size", rollout_kl="k3", rollout_kl_coefficient=1.0),
            "the batch's effective share of samples caps the ratio; 1 minus this share weights a KL to the engine",
            "P3O, arXiv 2605.12380",
            *_STD_TOKENS,
        ),
        "nll": Preset(
            S(control="none", importance="none", supervised=True),
            "negative log-likelihood of given answers",
            "-",
            aggregation="token_mean",
        ),
        "experimental_topk_quadratic": Preset(
            S(divergence="topk_tv", control="quadratic", delta=0.2),
            "ours, experimental: DRPO's penalty on every top-K token, gradient through their log-probs",
            "this project",
        ),
    }
)
