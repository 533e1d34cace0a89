"""Signs that show in the metrics of a step. Each returns the evidence, None where there is none."""

from __future__ import annotations

import re

from .sign import Evidence, sign
from .steps import Past, Step

STILL = 50  # steps


@sign("everything masked", "a smaller optimizer.lr or fewer updates a step; check delta against the divergence's unit")
def everything_masked(step: Step, past: Past) -> Evidence:
    share = step.value("policy/masked_share")
    return None if share is None or share < 0.5 else f"{share:.0%} of the tokens with an advantage are masked"


@sign("not finite", "a smaller optimizer.lr; check dtypes and the start model's weights")
def non_finite(step: Step, past: Past) -> Evidence:
    found = [f"{name} has no finite value" for name in ("train/loss", "train/grad_norm") if _is_null(step, name)]
    counted = {name: step.value(name) for name in ("train/nonfinite_tokens", "rollout/invalid_samples")}
    # In fp16 some updates overflow, until the loss scale fits.
    overflowed = step.value("train/overflowed_updates") or 0
    counted["train/skipped_updates"] = (step.value("train/skipped_updates") or 0) - overflowed
    found += [f"{name} {value:.0f}" for name, value in counted.items() if value]
    return ", ".join(found) or None


@sign("stale beyond the bound", "rollout.beyond_bound: drop or wait; fewer rollout.max_concurrent_groups")
def stale_beyond_bound(step: Step, past: Past) -> Evidence:
    bound, found = step.setting("rollout.max_staleness", int), step.value("rollout/staleness_max")
    if bound is None or found is None or found <= bound or step.setting("rollout.bank", str):
        return None
    return f"a token is {found:.0f} versions old, rollout.max_staleness is {bound}"


@sign(
    "rewards fail",
    "see the orchestrator's log; correct the environment or agent where that failed (or the limit it met), else the "
    "reward or reward.timeout_s",
)
def rewards_failed(step: Step, past: Past) -> Evidence:
    failed, samples = step.value("rollout/reward_failed"), step.value("train/sequences")
    samples = sum(entry.num_samples for entry in step.entries) or samples
    if not failed or (samples and failed < 0.01 * samples):
        return None
    counts = {name: v for name, v in step.metrics.items() if re.match("(reward|environment)/failed_", name) and v}
    reasons = sorted(counts.items(), key=lambda count: -count[1])
    named = ", ".join(f"{name.replace('/failed_', ' ')} {count:.0f}" for name, count in reasons)
    of = f" of {samples:.0f}" if samples else ""
    return f"{failed:.0f}{of} samples have no reward" + (f": {named}" if named else "")


@sign("truncation", "raise rollout.max_response_tokens, or look for an end-of-sequence token that never comes")
def truncated(step: Step, past: Past) -> Evidence:
    share = step.value("rollout/truncated_share")
    if share is None or share < 0.5:
        return None
    limit = "rollout.max_response_tokens"
    if step.setting("environment.max_turn_tokens", int):
        limit += " or environment.max_turn_tokens"
    return f"{share:.0%} of the responses end at {limit}, without a reward for their answer"


@sign("out of turns", "raise environment.max_turns, or let the environment end a trajectory that is done")
def out_of_turns(step: Step, past: Past) -> Evidence:
    share = step.value("environment/max_turns_share")
    return None if share is None or share < 0.5 else f"{share:.0%} of the trajectories end at environment.max_turns"


@sign("entropy collapse", "a smaller optimizer.lr, fewer updates a step, or a wider region for A > 0")
def entropy_collapsed(step: Step, past: Past) -> Evidence:
    first, now = past.at_start("train/entropy"), step.value("train/entropy")
    if first is None or now is None or now > 0.1 * first or _improved(step, past):
        return None
    return f"entropy {now:.2g} nats, {first:.2g} at the start, and the reward has not risen"


@sign("length explosion", "read the longest answers; reward.overlong_buffer or objective.overlong_filter")
def length_exploded(step: Step, past: Past) -> Evidence:
    name = "rollout/response_tokens_mean"
    now, recent, first = step.value(name), past.recent(name), past.at_start(name)
    if now is None or recent is None or first is None:
        return None
    if now > 3 * recent:
        return f"{now:.0f} tokens a response, {recent:.0f} in the steps before"
    if now > 4 * first and not _improved(step, past):
        return f"{now:.0f} tokens a response, {first:.0f} at the start, and the reward has not risen"
    return None


@sign("no learning signal", "`data filter --pass-rate`, a larger rollout.group_size, or rollout.dynamic_sampling")
def no_learning_signal(step: Step, past: Past) -> Evidence:
    groups = len(step.entries) or step.setting("rollout.prompts_per_step", int)
    without, norm = step.value("rollout/groups_without_signal"), step.value("train/grad_norm")
    if norm == 0 and step.setting("optimizer.lr"):
        return "the gradient is 0"
    if not groups or without is None or without < 0.9 * groups:
        return None
    mean = step.value("rollout/reward_mean")
    if mean is not None and past.reward_means and _improved(step, past):
        return None  # solved, by and by
    return f"in {without:.0f} of {groups} groups all samples have the same reward"


@sign("reward stands still", "read answers with low reward; another optimizer.lr, delta or grader; easier prompts")
def reward_stands_still(step: Step, past: Past) -> Evidence:
    """With a signal, for fifty steps, and not because the prompts are solved."""
    means = past.reward_means[-STILL:]
    if len(past.reward_means) < STILL or not step.setting("optimizer.lr"):
        return None
    span, few = past.highest_reward - past.lowest_reward, STILL // 5
    before, now = sum(means[:few]) / few, sum(means[-few:]) / few
    if now > before + 0.02 * span or now > past.highest_reward - 0.1 * span:
        return None
    return f"mean reward {now:.3g}, {before:.3g} {STILL} steps before"


@sign("engine and trainer differ from the start", "compare temperature, dtype and model of engine and trainer")
def differs_from_the_start(step: Step, past: Past) -> Evidence:
    """At the first step engine and trainer hold the same weights, so nothing but the computation can differ."""
    if past.metrics or step.value("rollout/staleness_max"):
        return None
    kl = step.value("mismatch/kl")
    return None if kl is None or kl < 0.02 else f"mismatch/kl {kl:.2g} nats a token before the first update"


@sign("weights did not arrive", "see the trainer's log for the publish of that step; keep weight_sync.fingerprint on")
def weights_did_not_arrive(step: Step, past: Past) -> Evidence:
    """All at once: a policy that drifts away does not do so within one step."""
    unconfirmed = step.value("engine/unconfirmed")
    version, lag = step.newest_version, step.setting("rollout.max_staleness", int) or 0
    still = past.newest_versions[-(lag + 2) :]
    follows = not step.setting("rollout.bank", str) and version is not None
    if follows and len(still) == lag + 2 and min(still) == version:
        return f"the engines have sampled with version {version} since {lag + 2} steps"
    now, before = step.value("mismatch/kl"), past.values("mismatch/kl")[-1:]
    if now is None or not before or now < 0.01 or now < 20 * before[0]:
        return None
    more = f"; {unconfirmed:.0f} engines not verified" if unconfirmed else ""
    return f"mismatch/kl {now:.2g} nats a token, {before[0]:.2g} one step before{more}"


@sign(
    "mismatch grows", "objective.mismatch: truncate, routing replay with experts, or a higher precision in the engine"
)
def mismatch_grows(step: Step, past: Past) -> Evidence:
    name = "mismatch/kl"
    now, first = step.value(name), past.at_start(name)
    if now is None or first is None or len(past.metrics) < 3 or now < 1e-3 or now < 10 * first:
        return None
    return f"mismatch/kl {now:.2g} nats a token, {first:.2g} in the first steps"


def _is_null(step: Step, name: str) -> bool:
    return name in step.metrics and step.metrics[name] is None


def _improved(step: Step, past: Past) -> bool:
    mean = step.value("rollout/reward_mean")
    return mean is not None and past.improved(mean)
