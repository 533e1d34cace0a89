"""The metric names every run records: one table with unit and meaning, so that runs compare by name.

A record is one line of metrics.jsonl: `step`, `time` (Unix seconds) and any of these. Names outside the table
are allowed (an objective reports more of itself, see `objectives`); `unknown_names` lists them.
`metrics_markdown` is the table for the documentation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    unit: str
    meaning: str


_TRAIN = (
    Metric("train/loss", "1", "loss, mean over the step's updates"),
    Metric("train/grad_norm", "1", "global gradient norm before clipping, mean over the step's updates"),
    Metric("train/lr", "1", "learning rate of the step's last update"),
    Metric("train/updates", "count", "optimizer updates of this step, skipped ones included"),
    Metric("train/skipped_updates", "count", "updates of this step skipped for a non-finite gradient"),
    Metric("train/sequences", "count", "responses trained on in this step"),
    Metric("train/tokens", "tokens", "prompt and response tokens trained on in this step"),
    Metric("train/entropy", "nats", "policy entropy, mean over tokens that carry loss"),
)
_POLICY = (
    Metric("policy/masked_share", "share", "tokens masked by the trust region, of those with advantage != 0"),
    Metric("policy/masked_share_positive", "share", "the same among tokens with advantage > 0"),
    Metric("policy/masked_share_negative", "share", "the same among tokens with advantage < 0"),
    Metric("policy/divergence_mean", "method's", "divergence of the trained policy from the anchor, by the method"),
    Metric("policy/divergence_max", "method's", "its largest value in the step"),
    Metric("policy/ratio_min", "1", "smallest importance ratio, as the method defines it, before cap and floor"),
    Metric("policy/ratio_max", "1", "largest importance ratio, as the method defines it, before cap and floor"),
)
_MISMATCH = (
    Metric("mismatch/kl", "nats", "KL(rollout || trainer) per token, by what the engine said when sampling"),
    Metric("mismatch/max_abs_logprob_difference", "nats", "largest engine-trainer difference of a token"),
    Metric("moe/routing_replay_disagreement", "share", "replayed experts that the trainer would not have chosen"),
    Metric("probe/mean_abs_logprob_difference", "nats", "mean difference on the probe, after a publish"),
    Metric("probe/max_abs_logprob_difference", "nats", "largest difference on the probe, after a publish"),
)
_PUBLISH = (Metric("publish/bytes_per_s", "bytes/s", "size of the weights / seconds of exporting and loading them"),)
_ROLLOUT = (
    Metric("rollout/reward_mean", "reward", "mean over the samples of the batch"),
    Metric("rollout/reward_failed", "count", "samples whose verifier raised or timed out"),
    Metric("rollout/response_tokens_mean", "tokens", "mean response length"),
    Metric("rollout/truncated_share", "share", "responses cut at rollout.max_response_tokens"),
    Metric("rollout/groups_without_signal", "count", "groups without any advantage: all rewards are equal"),
    Metric("rollout/overlong_filtered", "count", "cut responses left out of the loss (objective.overlong_filter)"),
    Metric("rollout/overlong_penalty_mean", "reward", "what reward.overlong_buffer adds, mean over the samples"),
    Metric("rollout/staleness_mean", "versions", "policy versions between sampling and training, mean over tokens"),
    Metric("rollout/staleness_max", "versions", "its largest value in the batch"),
    Metric("rollout/mixed_version_groups", "count", "groups whose tokens are of more than one policy"),
    Metric("rollout/too_stale_groups", "count", "groups given up beyond rollout.max_staleness (beyond_bound: drop)"),
    Metric("rollout/continued_samples", "count", "times a sample was cut off by an update and continued"),
    Metric(
        "rollout/invalid_samples", "count", "groups refused because an engine returned invalid samples, then retried"
    ),
    Metric("rollout/dropped_groups", "count", "groups without signal that dynamic sampling replaced"),
    Metric("rollout/generated_tokens_per_s", "tokens/s", "response tokens of all engines while generating"),
)
_ENGINE = (
    Metric("engine/serving", "count", "engines that served when the step's last group was done"),
    Metric("engine/deaths", "count", "times an engine was given up since the last record"),
    Metric("engine/restarts", "count", "times an engine came back as another process"),
    Metric("engine/caught_up", "count", "times the orchestrator verified an engine's weights itself"),
    Metric("engine/retried_requests", "count", "requests sent again because an engine failed"),
    Metric("engine/unconfirmed", "count", "engines that a publish left out because they did not answer"),
)
_STEP_PARTS = (  # disjoint; what time/step_s holds beyond them is "other"
    Metric("time/wait_s", "s", "part of the step: waiting for its rollouts"),
    Metric("time/read_s", "s", "part of the step: reading and packing its rollouts"),
    Metric("time/recompute_s", "s", "part of the step: log-probs by the weights the step starts from"),
    Metric("time/reference_s", "s", "part of the step: log-probs by the reference policy"),
    Metric("time/forward_backward_s", "s", "part of the step: forward and backward passes"),
    Metric("time/optimizer_s", "s", "part of the step: gradient reduction, clipping, update"),
    Metric("time/publish_s", "s", "part of the step: new weights to the engines"),
    Metric("time/checkpoint_s", "s", "part of the step: saving a checkpoint"),
)
_PUBLISH_PARTS = (
    Metric("time/publish_export_s", "s", "part of publish: gathering and writing the weights"),
    Metric("time/publish_load_s", "s", "part of publish: the engines load them"),
    Metric("time/publish_probe_s", "s", "part of publish: scoring the probe on both sides"),
)
_TIME = (
    Metric("time/step_s", "s", "wall time of the step"),
    *_STEP_PARTS,
    *_PUBLISH_PARTS,
    Metric("time/generate_s", "s", "engines: first request to last group of the step; may overlap training"),
    Metric("time/eval_s", "s", "greedy evaluation; not in the step"),
    Metric("throughput/tokens_per_s", "tokens/s", "train/tokens / time/step_s"),
)
_EVAL = (
    Metric("eval/accuracy", "share", "greedy accuracy on data.eval after `step` steps; 0 = start policy"),
    Metric("eval/version_spread", "versions", "newer policies that answered too: 0 = all of the policy after `step`"),
    Metric("eval/response_tokens_mean", "tokens", "mean length of the greedy answers"),
    Metric("eval/prompts", "count", "held-out prompts"),
)

METRICS: tuple[Metric, ...] = (*_TRAIN, *_POLICY, *_MISMATCH, *_PUBLISH, *_ROLLOUT, *_ENGINE, *_TIME, *_EVAL)
RECORD_KEYS = ("step", "time")
STEP_PARTS = tuple(m.name for m in _STEP_PARTS)
PUBLISH_PARTS = tuple(m.name for m in _PUBLISH_PARTS)


def unknown_names(names: Iterable[str]) -> list[str]:
    """Those of `names` that the table does not have, in order."""
    known = {m.name for m in METRICS}.union(RECORD_KEYS)
    return [name for name in names if name not in known]


def is_step_record(record: Mapping[str, Any]) -> bool:
    """True for the record of a training step. Evaluations, engine timings and probes may come separately."""
    return any(name == "time/step_s" or name.startswith("train/") for name in record)


def metrics_markdown() -> str:
    """The table for the documentation."""
    rows = [f"| `{m.name}` | {m.unit} | {m.meaning} |" for m in METRICS]
    return "\n".join(["| name | unit | meaning |", "|---|---|---|", *rows]) + "\n"
