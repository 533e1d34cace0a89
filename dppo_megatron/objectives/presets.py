"""The methods of the papers as data: a name, its axes, its published advantage and aggregation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .settings import ObjectiveSettings as S


@dataclass(frozen=True)
class Preset:
    """A method and what the paper ran it with.

    `advantage` and `aggregation` are advice for the run's configuration, not applied by the objective.
    """

    settings: S
    summary: str
    source: str
    advantage: str = "group_mean"
    aggregation: str = "seq_mean_token_sum_norm"


_DPPO, _DRPO, _SPO = "DPPO, arXiv 2602.04879", "DRPO, arXiv 2606.09821", "SPO, arXiv 2401.16025"
_GROUP_STD = {"advantage": "group_mean_std"}


def _ratio(low: float = 0.2, high: float = 0.2, **axes: Any) -> S:
    return S(divergence="ratio", epsilon_low=low, epsilon_high=high, **axes)


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "dppo_binary_tv": Preset(
            S(divergence="binary_tv", delta=0.15),
            "mask by the shift of the sampled token's probability",
            _DPPO,
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
            "mask where the update would raise the divergence further",
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
            _ratio(),
            "PPO's clip with group-relative advantages",
            "GRPO, arXiv 2402.03300 eq. 3",
            aggregation="seq_mean_token_mean",
            **_GROUP_STD,
        ),
        "grpo_clip_higher": Preset(
            _ratio(0.2, 0.28),
            "GRPO with a wider upper bound",
            "clip-higher of DAPO, arXiv 2503.14476",
            aggregation="seq_mean_token_mean",
            **_GROUP_STD,
        ),
        "dapo": Preset(
            _ratio(0.2, 0.28),
            "clip-higher with a token-level mean; soft overlong penalty and dynamic sampling beside it",
            "DAPO, arXiv 2503.14476 eq. 8",
            aggregation="token_mean",
            **_GROUP_STD,
        ),
        "minirl": Preset(
            _ratio(0.2, 0.27, anchor="old", gradient_path="logprob"),
            "clip of pi over the old policy, importance ratio to the rollout policy",
            "MiniRL, arXiv 2512.01374",
        ),
        "minirl_tis": Preset(
            _ratio(0.2, 0.27, anchor="old", ratio_cap=3.0),
            "MiniRL with a truncated importance ratio",
            _DPPO,
        ),
        "cispo": Preset(
            S(control="none", ratio_floor=0.0, ratio_cap=5.0),
            "no trust region; the ratio is clipped to [1 - 1, 1 + 4] and detached",
            "CISPO, arXiv 2506.13585 eq. 4",
            aggregation="token_mean",
            **_GROUP_STD,
        ),
        "pg_is": Preset(S(control="none"), "importance-weighted policy gradient, no trust region", _DPPO),
        "pg_tis": Preset(
            S(control="none", ratio_cap=3.0),
            "the same with the ratio truncated at 3 (the DPPO paper's 'CISPO')",
            _DPPO,
        ),
        "gspo": Preset(
            _ratio(3e-4, 4e-4, ratio_level="sequence"),
            "clip of the geometric mean of the ratio over the response",
            "GSPO, arXiv 2507.18071 eq. 5-7",
            aggregation="seq_mean_token_mean",
            **_GROUP_STD,
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
