"""Defines the doctor's checks. A check reads one step and returns evidence of a problem, or None.

docs/doctor.md lists the checks in this order.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable

import numpy as np

from dppo_megatron.bank import BankEntry

from .steps import FIRST, ExaminedStep, Past

Evidence = str | None

GROUPS, TOKENS = 4, 1 << 16  # limits for rollouts read per step, so that a step costs milliseconds
IMPOSSIBLE = math.log(1e-9)  # a less probable event is evidence of a problem
STILL = 50  # steps without a rising reward


Look = Callable[[ExaminedStep, Past], Evidence]
Check = tuple[str, Look, str]  # problem name, function that finds the problem in a step, remedy
CHECKS: list[Check] = []


def check(name: str, remedy: str) -> Callable[[Look], Look]:
    """Add the decorated function to `CHECKS`."""

    def add(look: Look) -> Look:
        CHECKS.append((name, look, remedy))
        return look

    return add


@check("constant reward", "grade some answers of the bank by hand with the reward")
def constant_reward(step: ExaminedStep, past: Past) -> Evidence:
    rewards = step.rewards
    if len(rewards) < 4 or rewards.min() != rewards.max():
        return None
    value = float(rewards[0])
    if past.reward_means and value == past.highest_reward > past.lowest_reward:
        jump = value - past.reward_means[-1]
        if jump < 0.4 * (past.highest_reward - past.lowest_reward):
            return None  # solved
    return f"all {len(rewards)} samples have the reward {value:g}"


@check(
    "no learning signal",
    "a lower optimizer.lr if the reward fell since the first steps; else `data filter --pass-rate`, a larger "
    "rollout.group_size, or rollout.dynamic_sampling",
)
def no_learning_signal(step: ExaminedStep, past: Past) -> Evidence:
    groups = len(step.entries) or step.setting("rollout.prompts_per_step", int)
    without, norm = step.value("rollout/groups_without_signal"), step.value("train/grad_norm")
    if norm == 0 and step.setting("optimizer.lr"):
        return "the gradient is 0"
    if not groups or without is None or without < 0.9 * groups:
        return None
    if past.improved(step):
        return None  # solved gradually
    return f"in {without:.0f} of {groups} groups all samples have the same reward"


@check(
    "reward stands still",
    "look at the spread of rewards in groups, truncation, held-out reward, mismatch and gradient norm, in this order; "
    "then read answers with low reward; another optimizer.lr, delta or grader; easier prompts",
)
def reward_stands_still(step: ExaminedStep, past: Past) -> Evidence:
    """Check whether the reward has not risen for fifty steps although the prompts are not solved."""
    means = past.reward_means[-STILL:]
    if len(past.reward_means) < STILL or not step.setting("optimizer.lr"):
        return None
    span, window = past.highest_reward - past.lowest_reward, STILL // 5
    old_mean, new_mean = sum(means[:window]) / window, sum(means[-window:]) / window
    if new_mean > old_mean + 0.02 * span or new_mean > past.highest_reward - 0.1 * span:
        return None
    return f"mean reward {new_mean:.3g}, {old_mean:.3g} {STILL} steps before"


@check(
    "rewards fail",
    "see the orchestrator's log; correct the environment or agent where that failed (or the limit it met), else the "
    "reward or reward.timeout_s",
)
def rewards_failed(step: ExaminedStep, past: Past) -> Evidence:
    failed, samples = step.value("rollout/reward_failed"), step.value("train/sequences")
    samples = sum(entry.num_samples for entry in step.entries) or samples
    if not failed or (samples and failed < 0.01 * samples):
        return None
    counts = {name: v for name, v in step.metrics.items() if re.match("(reward|environment)/failed_", name) and v}
    reasons = sorted(counts.items(), key=lambda count: -count[1])
    named = ", ".join(f"{name.replace('/failed_', ' ')} {count:.0f}" for name, count in reasons)
    suffix = f" of {samples:.0f}" if samples else ""
    return f"{failed:.0f}{suffix} samples have no reward" + (f": {named}" if named else "")


@check(
    "cloned samples", "the engine draws all samples of a prompt from one seed: check its version and engine.extra_args"
)
def cloned_samples(step: ExaminedStep, past: Past) -> Evidence:
    """Check for more identical samples than chance allows.

    If a sample has probability p, chance makes k of n samples equal in at most a share C(n, k) p^(k - 1) of groups.
    Example: with p = 0.01, three of 8 samples are equal in at most 56 x 0.0001 = 0.0056 of all groups.
    """
    for entry in step.entries:
        length, alike = Counter(entry.response_lengths.tolist()).most_common(1)[0] if entry.num_samples else (0, 0)
        if alike < 2 or 2 * alike < entry.num_samples or length * alike > TOKENS:
            continue
        same = np.flatnonzero(entry.response_lengths == length).tolist()
        rollouts = step.read_group(entry, same, ("core",)).rollouts
        kinds = Counter(rollout.token_ids.tobytes() for rollout in rollouts)
        ids, copies = kinds.most_common(1)[0]
        logprob = max(float(r.rollout_logprob.sum()) for r in rollouts if r.token_ids.tobytes() == ids)
        if copies > 1 and math.log(math.comb(entry.num_samples, copies)) + (copies - 1) * logprob < IMPOSSIBLE:
            return (
                f"prompt {entry.position}: {copies} of {entry.num_samples} samples are the same {length} tokens, "
                f"each of probability {math.exp(logprob):.1g}"
            )
    return None


@check(
    "log-probs of another temperature",
    "the engine must return log-probs after temperature, and verify drafts without loss (no synthetic acceptance, no "
    "greedy verification): check engine.extra_args and the servers of engine.urls",
)
def other_temperature(step: ExaminedStep, past: Past) -> Evidence:
    """Check that engines draw the most likely listed token as often as its log-prob predicts."""
    expected = step.setting("rollout.temperature", int, float)
    for entry in step.entries:
        if expected is not None and not math.isclose(entry.temperature, expected, rel_tol=1e-6):
            return (
                f"prompt {entry.position} was sampled at temperature {entry.temperature:g}, the config has {expected:g}"
            )
    if not all(entry.topk for entry in step.entries):
        return None
    hit_parts, chance_parts = [np.zeros(0)], [np.zeros(0)]
    for entry, samples in _first_samples(step):
        for rollout in step.read_group(entry, samples, ("core", "topk")).rollouts:
            if rollout.topk_ids is None or rollout.rollout_topk_logprob is None or rollout.spans is not None:
                continue
            logprobs = np.where(rollout.topk_ids < 0, -np.inf, rollout.rollout_topk_logprob)
            best = logprobs.argmax(axis=1)
            rows = np.arange(len(best))
            hit_parts.append(rollout.topk_ids[rows, best] == rollout.token_ids)
            chance_parts.append(np.exp(logprobs[rows, best]))
    hits, chance = np.concatenate(hit_parts), np.concatenate(chance_parts)
    spread = math.sqrt(float((chance * (1 - chance)).clip(0).sum()) + 1)
    off = float(hits.sum() - chance.sum())
    if len(hits) < 100 or abs(off) < 7 * spread or abs(off) < 0.02 * len(hits):
        return None
    return f"the likeliest token was drawn {hits.mean():.0%} of the time, its log-probs predict {chance.mean():.0%}"


@check("tokenizer of another model", "model.path must have the tokenizer of the bank's rollouts")
def other_tokenizer(step: ExaminedStep, past: Past) -> Evidence:
    tokenizer = step.tokenizer
    if tokenizer is None:
        return None
    truncated = step.setting("data.overlong") == "truncate"
    for entry, samples in _first_samples(step):
        if mismatch := tokenizer.mismatch(step.read_group(entry, samples[:1], ("core",)), truncated=truncated):
            return f"prompt {entry.position}: model.path's tokenizer {mismatch}"
    return None


@check("wrong special tokens", "check data.chat_template and data.prompt_template by `data inspect`")
def wrong_special_tokens(step: ExaminedStep, past: Past) -> Evidence:
    tokenizer = step.tokenizer
    if tokenizer is None:
        return None
    for entry, _ in _first_samples(step):
        prompt = step.read_group(entry, (), ("core",)).prompt
        ids = prompt.token_ids.tolist()
        if len(ids) > 1 and ids[0] == ids[1] and ids[0] in tokenizer.special:
            return f"prompt {entry.position} begins with {tokenizer.special[ids[0]]} twice"
        if foreign := tokenizer.foreign_markers(prompt.text):
            return f"prompt {entry.position} has {', '.join(foreign[:3])}, which this tokenizer does not know"
        for id_, content in tokenizer.special.items():
            if prompt.text.count(content) > ids.count(id_):
                return f"prompt {entry.position} spells {content} in letters: it is not encoded as one token"
    return None


@check("truncation", "raise rollout.max_response_tokens, or look for an end-of-sequence token that never comes")
def truncated(step: ExaminedStep, past: Past) -> Evidence:
    share = step.value("rollout/truncated_share")
    if share is None or share < 0.5:
        return None
    rewards, cut = step.rewards, step.rewards_of_truncated
    if len(cut) and cut.mean() - rewards.min() > 0.5 * (rewards.mean() - rewards.min()) > 0:
        return None  # they answer before the limit
    limit = "rollout.max_response_tokens"
    if step.setting("environment.max_turn_tokens", int):
        limit += " or environment.max_turn_tokens"
    return f"{share:.0%} of the responses end at {limit}"


@check(
    "held-out reward does not follow",
    "compare the prompts of data.eval and data.train by `data inspect` (template, prefix, length); else more prompts",
)
def held_out_reward_stays(step: ExaminedStep, past: Past) -> Evidence:
    """Check, from the third evaluation on, whether it gained less than a tenth of the training gain."""
    names = [name for name in ("eval/reward_mean", "eval/accuracy") if step.value(name) is not None]
    if not names or len(scores := past.first(names[0])) < 2 or not past.improved(step):
        return None
    gain = float(step.value("rollout/reward_mean") or 0) - float(np.mean(past.reward_means[:FIRST]))
    now = step.value(names[0]) or 0.0
    if now > scores[0] + 0.1 * gain:
        return None
    return f"{names[0]} {now:.3g}, {scores[0]:.3g} at the first evaluation; the training reward rose by {gain:.3g}"


@check(
    "alike answers",
    "read them by `view`: where an answer that ignores its prompt earns reward, correct the reward; else a smaller "
    "optimizer.lr",
)
def alike_answers(step: ExaminedStep, past: Past) -> Evidence:
    """Check whether one text is half of the answers to each prompt, or one token is four fifths of their tokens.

    Answers with fewer than 8 tokens are skipped, because a class or a number may be right for several prompts.
    """
    answers: dict[str, list[np.ndarray]] = {}
    for entry, samples in _first_samples(step):
        group = step.read_group(entry, samples, ("core",))
        long = [rollout.token_ids for rollout in group.rollouts if len(rollout.token_ids) >= 8]
        if 2 * len(long) >= len(group.rollouts) > 0:
            answers.setdefault(group.prompt.text, []).extend(long)
    if len(answers) < 2:
        return None
    for threshold, about, kinds in (
        (0.5, "answers are the same text", [Counter(ids.tobytes() for ids in arrays) for arrays in answers.values()]),
        (0.8, "tokens are the same token", [Counter(np.concatenate(arrays).tolist()) for arrays in answers.values()]),
    ):
        common = sum(kinds, Counter()).most_common(1)[0][0]
        share = min(kind[common] / kind.total() for kind in kinds)
        if share >= threshold:
            return f"to {len(answers)} different prompts, at least {share:.0%} of the {about}"
    return None


@check("out of turns", "raise environment.max_turns, or let the environment end a trajectory that is done")
def out_of_turns(step: ExaminedStep, past: Past) -> Evidence:
    share = step.value("environment/max_turns_share")
    return None if share is None or share < 0.5 else f"{share:.0%} of the trajectories end at environment.max_turns"


@check("length explosion", "read the longest answers; reward.overlong_buffer or objective.overlong_filter")
def length_exploded(step: ExaminedStep, past: Past) -> Evidence:
    name = "rollout/response_tokens_mean"
    now, recent, first = step.value(name), past.recent(name), past.at_start(name)
    if now is None or recent is None or first is None:
        return None
    if now > 3 * recent:
        return f"{now:.0f} tokens a response, {recent:.0f} in the steps before"
    if now > 4 * first and not past.improved(step):
        return f"{now:.0f} tokens a response, {first:.0f} at the start, and the reward has not risen"
    return None


@check("entropy collapse", "a smaller optimizer.lr, fewer updates a step, or a wider region for A > 0")
def entropy_collapsed(step: ExaminedStep, past: Past) -> Evidence:
    first, now = past.at_start("train/entropy"), step.value("train/entropy")
    if first is None or now is None or now > 0.1 * first or past.improved(step):
        return None
    return f"entropy {now:.2g} nats, {first:.2g} at the start, and the reward has not risen"


@check("everything masked", "a smaller optimizer.lr or fewer updates a step; check delta against the divergence's unit")
def everything_masked(step: ExaminedStep, past: Past) -> Evidence:
    share = step.value("policy/masked_share")
    return None if share is None or share < 0.5 else f"{share:.0%} of the tokens with an advantage are masked"


@check("stale beyond the bound", "rollout.beyond_bound: drop or wait; fewer rollout.max_concurrent_groups")
def stale_beyond_bound(step: ExaminedStep, past: Past) -> Evidence:
    bound, staleness = step.setting("rollout.max_staleness", int), step.value("rollout/staleness_max")
    if bound is None or staleness is None or staleness <= bound or step.setting("rollout.bank", str):
        return None
    return f"a token is {staleness:.0f} versions old, rollout.max_staleness is {bound}"


@check("not finite", "a smaller optimizer.lr; check dtypes and the start model's weights")
def non_finite(step: ExaminedStep, past: Past) -> Evidence:
    problems = [
        f"{name} has no finite value" for name in ("train/loss", "train/grad_norm") if step.metrics.get(name, 0) is None
    ]
    counted = {name: step.value(name) for name in ("train/nonfinite_tokens", "rollout/invalid_samples")}
    # In fp16 some updates overflow until the loss scale fits.
    overflowed = step.value("train/overflowed_updates") or 0
    counted["train/skipped_updates"] = (step.value("train/skipped_updates") or 0) - overflowed
    problems += [f"{name} {value:.0f}" for name, value in counted.items() if value]
    return ", ".join(problems) or None


@check("routes missing", "the engine must return the experts of every token: docs/engines.md")
def routes_missing(step: ExaminedStep, past: Past) -> Evidence:
    if not step.setting("rollout.routing_replay"):
        return None
    without = sum(entry.routing is None for entry in step.entries)
    if without:
        return f"{without} of {len(step.entries)} groups have no experts"
    share = step.value("moe/routing_replay_disagreement")
    return None if share is None or share < 0.5 else f"the trainer rejects {share:.0%} of the replayed experts"


@check("engine and trainer differ from the start", "compare temperature, dtype and model of engine and trainer")
def differs_from_the_start(step: ExaminedStep, past: Past) -> Evidence:
    """Check for a mismatch at the first step.

    Engine and trainer have the same weights there, so only their computation can differ.
    """
    if past.steps or step.value("rollout/staleness_max"):
        return None
    kl = step.value("mismatch/kl")
    return None if kl is None or kl < 0.02 else f"mismatch/kl {kl:.2g} nats a token before the first update"


@check("weights did not arrive", "see the trainer's log for the publish of that step; keep weight_sync.fingerprint on")
def weights_did_not_arrive(step: ExaminedStep, past: Past) -> Evidence:
    """Check for engines that keep sampling with an old version, and for a mismatch that appears within one step.

    Missing weights cause such a mismatch. A drifting policy needs more steps.
    """
    unconfirmed = step.value("engine/unconfirmed")
    version, lag = step.newest_version, step.setting("rollout.max_staleness", int) or 0
    versions = past.newest_versions[-(lag + 2) :]
    follows = not step.setting("rollout.bank", str) and version is not None
    if follows and len(versions) == lag + 2 and min(versions) == version:
        return f"the engines have sampled with version {version} for {lag + 2} steps"
    now, previous = step.value("mismatch/kl"), past.last("mismatch/kl")
    if now is None or previous is None or now < 0.01 or now < 20 * previous:
        return None
    note = f"; {unconfirmed:.0f} engines not verified" if unconfirmed else ""
    return f"mismatch/kl {now:.2g} nats a token, {previous:.2g} one step before{note}"


@check(
    "mismatch grows", "objective.mismatch: truncate, routing replay with experts, or a higher precision in the engine"
)
def mismatch_grows(step: ExaminedStep, past: Past) -> Evidence:
    name, steps, factor, cause = "mismatch/kl", 3, 10, ""
    if step.setting("model.dtype", str) == "fp32" and (dtype := step.setting("engine.dtype", str)) in ("bf16", "fp16"):
        steps, factor, cause = 1, 4, f"; {dtype} engines round small updates of an fp32 trainer away"
    now, first = step.value(name), past.at_start(name)
    if now is None or first is None or past.steps < steps or now < 1e-3 or now < factor * first:
        return None
    return f"mismatch/kl {now:.2g} nats a token, {first:.2g} in the first steps{cause}"


@check("short lists of a teacher", "raise distillation.topk, and the teacher's --max-logprobs with it")
def short_teacher_lists(step: ExaminedStep, past: Past) -> Evidence:
    mass = step.value("distillation/tail_mass_teacher")
    return None if mass is None or mass < 0.05 else f"{mass:.0%} of the teacher's mass is outside its list"


@check("gradient norm spikes", "a smaller optimizer.lr or optimizer.grad_clip; read the step's rollouts by `view`")
def gradient_norm_spikes(step: ExaminedStep, past: Past) -> Evidence:
    now, recent = step.value("train/grad_norm"), past.recent("train/grad_norm")
    if now is None or recent is None or past.steps < 5 or now < 10 * recent or not recent:
        return None
    return f"train/grad_norm {now:.2g}, {recent:.2g} in the steps before"


def _first_samples(step: ExaminedStep) -> list[tuple[BankEntry, list[int]]]:
    """Return the first GROUPS groups with the numbers of their first samples, up to TOKENS tokens in all."""
    left, selection = TOKENS, []
    for entry in step.entries[:GROUPS]:
        ends = np.cumsum(entry.response_lengths)
        count = int(np.searchsorted(ends, left, side="right"))
        selection.append((entry, list(range(count))))
        left -= int(ends[count - 1]) if count else 0
    return selection
