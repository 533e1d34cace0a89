"""Define the methods of the papers as data: a name, its axes, its published advantage and aggregation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .settings import ObjectiveSettings as S


@dataclass(frozen=True)
class Preset:
    """Contains a method with the advantage and aggregation of its paper.

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
            S(divergence="binary_kl", delta=0.05), "mask by the KL of sampled token versus the rest", _DPPO
        ),
        "dppo_topk_tv": Preset(
            S(divergence="topk_tv", delta=0.15), "mask by total variation over the rollout's top K", _DPPO
        ),
        "dppo_topk_kl": Preset(S(divergence="topk_kl", delta=0.05), "mask by KL over the rollout's top K", _DPPO),
        "dppo_predictive": Preset(
            S(divergence="topk_tv", direction="predictive", delta=0.15),
            "mask where the update would raise the divergence further; ours gates on TV",
            "predictive masks, arXiv 2607.10848",
        ),
        "ipo": Preset(
            S(divergence="binary_tv", direction="symmetric", delta=0.15),
            "mask by the shift of the probability, whatever the sign of the advantage",
            "symmetric variant of the DPPO mask",
        ),
        "drpo": Preset(
            S(divergence="binary_tv", control="quadratic", delta=12.5),
            "quadratic penalty on the shift, as published: weight within [0.92, 1.08]",
            _DRPO,
        ),
        "drpo_tr": Preset(
            S(divergence="binary_tv", control="quadratic", delta=0.2),
            "the same with a delta that is a trust region: weight 0 at a shift of 0.2, corrective beyond",
            _DRPO,
        ),
        "mask_drpo": Preset(
            S(divergence="binary_tv", control="mask_quadratic", delta=0.15, penalty_delta=12.5),
            "the penalty of DRPO only outside DPPO's region",
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
            "clip-higher with a token-level mean; soft overlong penalty and dynamic sampling beside it",
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
            S(control="none", ratio_cap=3.0), "the same with the ratio truncated at 3 (the DPPO paper's 'CISPO')", _DPPO
        ),
        "gspo": Preset(
            _ratio(3e-4, 4e-4, ratio_level="sequence"),
            "clip of the geometric mean of the ratio over the response",
            "GSPO, arXiv 2507.18071 eq. 5-7",
            *_STD_SEQUENCES,
        ),
        "dppo_predictive_kl": Preset(
            S(divergence="topk_kl", direction="predictive", delta=0.05),
            "the same with the gate as published: the KL whose change is predicted, not TV",
            "predictive masks, arXiv 2607.10848",
        ),
        "dppo_negative_only": Preset(
            S(divergence="binary_tv", direction="negative", delta=0.5),
            "the least mask that kept training stable: only A < 0, and only where mu - pi > 0.5",
            _DPPO,
        ),
        "dppo_relaxed": Preset(
            S(divergence="binary_tv", delta=0.15, exempt_below=0.1),
            "DPPO without a region for tokens that the engine gave less than 0.1",
            _DPPO,
        ),
        "ipo_cap": Preset(
            S(divergence="binary_tv", direction="symmetric", delta=0.3, ratio_cap=1e4, gradient_path="through"),
            "prime-rl today: mask by the shift whatever the sign of A, ratio capped at 1e4",
            "prime-rl 0.8, loss type ipo",
            aggregation="token_mean",
        ),
        "bandpo_tv": Preset(
            S(divergence="binary_tv", delta=0.05),
            "clip to the band of a TV ball, 1 +- delta / mu: DPPO's mask by another road",
            "BandPO, arXiv 2603.04918",
            *_STD_SEQUENCES,
        ),
        "cppo": Preset(
            S(divergence="binary_tv", delta=0.2, position_weight=0.8, prefix_budget=0.02),
            "DPPO with stricter early positions and a budget for what the prefix has drifted",
            "CPPO, arXiv 2606.10968 eq. 8-11",
        ),
        "score_centering": Preset(
            S(control="none", importance="none", centering="policy"),
            "no ratio, no region: the score that the engine expects is subtracted from every token's",
            _SC,
            aggregation="token_mean",
        ),
        "score_centering_tis": Preset(
            S(control="none", ratio_cap=2.0, centering="policy"),
            "the same around a truncated ratio, better where rollouts are stale",
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
            "GRPO's clip, and no token that diverges further in a response whose mean |r - 1| is above 0.2",
            "VACO, arXiv 2603.01365; region and clip of open-instruct, its threshold ours",
            *_STD_TOKENS,
        ),
        "trm_max": Preset(
            S(control="none", response_region="max", response_divergence="k3", response_delta=0.05),
            "drop responses with any token whose k3 is above 0.05",
            f"{_TRM}, its threshold ours",
        ),
        "trm_mean": Preset(
            S(control="none", response_region="mean", response_divergence="k3", response_delta=0.001),
            "drop responses whose mean k3 is above 0.001",
            f"{_TRM}, its threshold ours",
        ),
        "opsm": Preset(
            _ratio(response_region="mean", response_divergence="k1", response_delta=0.5, response_sign="negative"),
            "GRPO's clip, and no response with A < 0 whose mean ln(mu / pi) is above 0.5",
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
            "detached ratio without a bound; drop responses whose mean binary KL is above 0.003",
            "FlashREINFORCE, its code of September 2026",
            advantage="batch_mean",
            aggregation="seq_mean_token_mean",
        ),
        "rollout_kl": Preset(
            S(control="none", importance="none", rollout_kl="squared", rollout_kl_coefficient=0.05),
            "no ratio, no region: a penalty on (ln r)^2 of every token holds the policy near the engine's",
            "DRO as in verl (half its beta); Kimi K2.5, arXiv 2602.02276; the coefficient ours",
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
            "a Gaussian of the ratio where it diverges, wider for rare tokens and by the advantage",
            "MASPO, arXiv 2602.17550, values of its code",
            *_STD_TOKENS,
        ),
        "aspo": Preset(
            S(control="gate", gate="inverse", epsilon_low=0.2, epsilon_high=0.2, dual_clip=3.0),
            "the ratio turned over where A > 0, with a soft dual clip on both signs",
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
            "no ratio where A > 0; the response's, at most 1, where A < 0",
            "TOPR, arXiv 2503.14286",
            aggregation="seq_mean_token_sum",
        ),
        "dispo": Preset(
            S(control="none", ratio_floor=0.0, ratio_cap=5.0, ratio_floor_negative=0.5, ratio_cap_negative=2.0),
            "CISPO with bounds of its own where A < 0",
            "DISPO, arXiv 2602.00983; the four bounds ours",
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
            "the ratio of the whole response, and none at all where it is above 2",
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
            "of the tokens that move away drop the largest |ln r| until the batch's mean of its square is below 0.04",
            "M2PO, arXiv 2510.01161",
            *_STD_TOKENS,
        ),
        "ess_adaptive": Preset(
            S(control="none", batch_statistic="effective_size", rollout_kl="k3", rollout_kl_coefficient=1.0),
            "the effective share of the batch caps the ratio, and what it lacks of 1 weighs a KL to the engine",
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
