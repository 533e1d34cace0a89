"""Lists the metrics of every run with unit and meaning.

A record is a line of metrics.jsonl: `step`, `time` (Unix seconds) and any of these metrics. An objective may add
metrics, see `objectives`. Each step has an orchestrator record about sampling and a trainer record. The orchestrator
record is missing if an earlier attempt began to sample the step.

- `reward/NAME`: with several rewards, the mean of reward NAME over the samples scored since the previous record. With
  stale rollouts, some of these samples belong to another step.
- `reward/failed_REASON`: number of samples without a reward.
- `environment/failed_REASON`: number of trajectories with an environment that raised, timed out or died.
- `teacher/NAME/kl`, `teacher/NAME/tail_mass`: computed for teacher NAME on sampled tokens, see docs/distillation.md.

Trained tokens carry loss in the step's updates. Without a KL or an entropy bonus, these are the tokens of responses
with an advantage. Other tokens are not computed.

A set NAME of `eval.sets` with n answers per prompt has metrics `eval/NAME/...`: `avg@n` (share of right answers),
`avg@n_stderr` (clustered by prompt), `pass@k`, `maj@n`, `reward_mean`, `failed_share` (not graded, count as wrong),
`response_tokens_mean`, `truncated_share`, `prompts`, `version_spread`, `seconds`; see docs/evaluation.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class MetricInfo(NamedTuple):
    name: str
    unit: str
    meaning: str


_ROWS = (
    ("train/loss", "1", "loss, mean over the step's updates"),
    ("train/grad_norm", "1", "global gradient norm before clipping, mean over updates that did not overflow"),
    ("train/lr", "1", "learning rate of the step's last update"),
    ("train/updates", "count", "optimizer updates of this step, skipped ones included"),
    ("train/skipped_updates", "count", "updates of this step skipped for a non-finite gradient"),
    ("train/overflowed_updates", "count", "fp16: those of them that overflowed, for which the loss scale was halved"),
    ("train/loss_scale", "1", "fp16: factor of the loss in the step's last update"),
    ("train/sequences", "count", "responses trained on in this step"),
    ("train/tokens", "tokens", "tokens that carry loss in this step's updates"),
    ("train/nonfinite_tokens", "tokens", "those of them with a loss that is not finite"),
    ("train/computed_rows", "tokens", "prompt and response tokens that the model computed, a shared prompt once"),
    ("train/reference_kl", "nats", "KL to the reference policy, mean over trained tokens"),
    ("train/entropy", "nats", "policy entropy, mean over trained tokens"),
    ("train/entropy_positive", "nats", "the same over trained tokens with advantage > 0"),
    ("train/entropy_negative", "nats", "the same over trained tokens with advantage < 0"),
    ("policy/masked_share", "share", "tokens masked by the trust region, of those with advantage != 0"),
    ("policy/masked_share_positive", "share", "the same among tokens with advantage > 0"),
    ("policy/masked_share_negative", "share", "the same among tokens with advantage < 0"),
    ("policy/outside_share", "share", "trained tokens beyond the threshold, whatever their advantage and direction"),
    ("policy/outside_share_positive", "share", "the same among tokens with advantage > 0"),
    ("policy/outside_share_negative", "share", "the same among tokens with advantage < 0"),
    ("policy/divergence_mean", "method's", "divergence from the anchor, by the method, mean over trained tokens"),
    ("policy/divergence_positive", "method's", "the same over trained tokens with advantage > 0"),
    ("policy/divergence_negative", "method's", "the same over trained tokens with advantage < 0"),
    ("policy/divergence_max", "method's", "its largest value among the step's trained tokens"),
    ("policy/ratio_min", "1", "smallest importance ratio, as the method defines it, before cap and floor"),
    ("policy/ratio_max", "1", "largest importance ratio, as the method defines it, before cap and floor"),
    # DPPO's theorem 3.2 and appendix B.3, see train/trainer/metrics.py; for rewards with magnitudes of at most 1
    ("bound/quadratic", "reward", "2 T (T - 1) D^2: T longest response, D largest |pi - mu| of a trained token"),
    ("bound/linear", "reward", "4 x the sum of TV over a response, mean over the trained responses"),
    ("acceptance/divergence", "method's", "divergence of the policy after the step, as it was accepted"),
    ("acceptance/divergence_whole", "method's", "divergence after the step's updates, before a reduction of the step"),
    ("acceptance/bound", "method's", "acceptance.bound"),
    ("acceptance/fraction", "share", "of the step that was kept; 1 = all, 0 = undone"),
    ("acceptance/lr_scale", "share", "of the schedule's learning rate that the step's updates had"),
    ("acceptance/rejected", "count", "places on the step's line that were beyond the bound"),
    ("mismatch/kl", "nats", "KL(rollout || trainer), mean over the trained tokens of the step's first update"),
    ("mismatch/kl_positive", "nats", "the same over those with advantage > 0"),
    ("mismatch/kl_negative", "nats", "the same over those with advantage < 0"),
    ("mismatch/total_variation", "share", "TV(rollout, trainer), |r - 1| / 2, mean over the first update's tokens"),
    ("mismatch/max_abs_logprob_difference", "nats", "largest engine-trainer difference of a token"),
    ("moe/routing_replay_disagreement", "share", "replayed experts that the trainer would not have chosen"),
    ("probe/mean_abs_logprob_difference", "nats", "weight check after a publish: mean log-prob difference"),
    ("probe/max_abs_logprob_difference", "nats", "weight check after a publish: largest log-prob difference"),
    ("publish/bytes", "bytes", "published bytes: whole weights, changed weights or adapters"),
    ("publish/bytes_per_s", "bytes/s", "publish/bytes / seconds of exporting and loading them"),
    ("publish/changed_share", "share", "elements with changed bits, if only those were published"),
    ("rollout/reward_mean", "reward", "mean over the samples of the batch"),
    ("rollout/reward_failed", "count", "samples whose verifier raised or timed out"),
    ("rollout/response_tokens_mean", "tokens", "tokens that the policy sampled, mean over the samples"),
    ("rollout/branches_mean", "count", "token sequences of a trajectory, mean; more than 1 where history was edited"),
    ("rollout/response_tokens_max", "tokens", "most tokens sampled for a response, in all its branches"),
    ("rollout/truncated_share", "share", "responses cut at rollout.max_response_tokens or environment.max_turn_tokens"),
    ("rollout/groups_without_signal", "count", "groups without any advantage: all rewards are equal"),
    ("rollout/overlong_filtered", "count", "truncated responses left out of the loss (objective.overlong_filter)"),
    ("rollout/overlong_penalty_mean", "reward", "reward that reward.overlong_buffer adds, mean over the samples"),
    ("rollout/kept_tokens_mean", "tokens", "left to draw from by top_p, top_k and min_p, mean over response tokens"),
    ("rollout/staleness_mean", "versions", "policy versions between sampling and training, mean over tokens"),
    ("rollout/staleness_max", "versions", "its largest value in the batch"),
    ("rollout/mixed_version_groups", "count", "groups whose tokens are of more than one policy"),
    ("rollout/too_stale_groups", "count", "groups aborted beyond rollout.max_staleness (beyond_bound: drop)"),
    ("rollout/too_stale_share", "share", "the same, of all groups that ended since the last record"),
    ("rollout/continued_samples", "count", "times an update interrupted a sample that was then continued"),
    ("rollout/invalid_samples", "count", "groups rejected because an engine returned invalid samples, then retried"),
    ("rollout/dropped_groups", "count", "groups without signal that dynamic sampling replaced"),
    ("rollout/generated_tokens_per_s", "tokens/s", "response tokens of all engines while generating"),
    ("environment/turns_mean", "count", "turns of the policy in a trajectory, mean"),
    ("environment/calls_mean", "count", "tool calls of a trajectory, mean; absent without tools and agent"),
    ("environment/call_errors_mean", "count", "of them answered by `error: ...`, or an agent's that cannot be read"),
    ("environment/max_turns_share", "share", "trajectories ended by environment.max_turns"),
    ("environment/rewritten_histories", "count", "times a chat template changed earlier turns, so that a branch began"),
    ("environment/replayed_turns", "count", "turns of an earlier process or environment that were not sampled again"),
    ("engine/serving", "count", "engines that served when the step's last group was done"),
    ("engine/deaths", "count", "times an engine was declared dead since the last record"),
    ("engine/restarts", "count", "times an engine came back as another instance"),
    ("engine/caught_up", "count", "times the orchestrator verified an engine's weights itself"),
    ("engine/retried_requests", "count", "requests sent again because an engine failed"),
    ("engine/unconfirmed", "count", "engines that a publish left out: no answer, a failed load, or other weights"),
    ("engine/prefix_hits", "share", "prompt tokens that engines found in their prefix caches (vLLM)"),
    ("engine/prefix_hits_min", "share", "the same of the engine with the fewest hits"),
    ("drafts/accepted_share", "share", "drafted tokens that were sampled (engine.draft_tokens)"),
    ("drafts/accepted_per_step", "tokens", "drafted tokens that were sampled, per sample and step with drafts"),
    ("drafts/saved_share", "share", "response tokens that did not need a separate decoding step"),
    ("time/step_s", "s", "wall time of the step"),
    # step parts are disjoint; the rest of time/step_s is "other"
    ("time/wait_s", "s", "part of the step: waiting for its rollouts"),
    ("time/read_s", "s", "part of the step: reading and packing its rollouts"),
    ("time/recompute_s", "s", "part of the step: old log-probs, by the weights the step starts from"),
    ("time/reference_s", "s", "part of the step: log-probs of the reference policy"),
    ("time/teacher_s", "s", "part of the step: lists of a teacher in the trainer's memory"),
    ("time/forward_backward_s", "s", "part of the step: forward and backward passes"),
    ("time/optimizer_s", "s", "part of the step: gradient reduction, clipping, update"),
    ("time/acceptance_s", "s", "part of the step: measuring its divergence, and reducing a step beyond the bound"),
    ("time/publish_s", "s", "part of the step: new weights to the engines"),
    ("time/checkpoint_s", "s", "part of the step: saving a checkpoint"),
    ("time/publish_export_s", "s", "part of publish: gathering and writing the weights"),
    ("time/publish_load_s", "s", "part of publish: the engines load them"),
    ("time/publish_probe_s", "s", "part of publish: the weight check"),
    ("time/publish_pause_s", "s", "part of publish_load: longest time an engine sampled nothing"),
    ("time/generate_s", "s", "engines: first request to last group of the step; may overlap training"),
    ("time/eval_s", "s", "greedy evaluation; not in the step"),
    ("throughput/tokens_per_s", "tokens/s", "train/tokens / time/step_s"),
    ("throughput/tflops_per_gpu", "TFLOP/s", "model FLOPs / seconds of updates and log-prob passes / trainer ranks"),
    ("throughput/mfu", "share", "the same over the GPU's peak in model.dtype or FP8; absent where that is unknown"),
    ("eval/accuracy", "share", "greedy answers to data.eval of reward >= eval.pass_reward; step 0 = start policy"),
    ("eval/reward_mean", "reward", "mean reward of the greedy answers; one that was not graded counts as 0"),
    ("eval/version_spread", "versions", "newest minus oldest policy that answered; 0 = all by that after `step`"),
    ("eval/response_tokens_mean", "tokens", "mean length of the greedy answers"),
    ("eval/prompts", "count", "held-out prompts"),
)
METRICS = tuple(MetricInfo(*row) for row in _ROWS)
STEP_PARTS = tuple(name for name, _, meaning in _ROWS if meaning.startswith("part of the step:"))
PUBLISH_PARTS = tuple(name for name, _, meaning in _ROWS if meaning.startswith("part of publish:"))


def evaluated_sets(record: Mapping[str, Any]) -> set[str]:
    """Return the names of the sets that a record evaluates; `heldout` is the data.eval set.

    Example: eval/accuracy and eval/math/avg@4 give {"heldout", "math"}.
    """
    parts = [name.split("/") for name in record if name.startswith("eval/")]
    return {part[1] if len(part) > 2 else "heldout" for part in parts}


def is_step_record(record: Mapping[str, Any]) -> bool:
    """Return whether a record is from a training step, not from an evaluation, engine timing or weight check."""
    return any(name == "time/step_s" or name.startswith("train/") for name in record)
