"""Signs that show in the bank: in the index lines of a step's groups, or in some of their tokens."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from dppo_megatron.bank import BankEntry

from .sign import Evidence, sign
from .steps import Past, Step

GROUPS, TOKENS = 4, 1 << 16  # of a step that are looked into, so that a step costs milliseconds
IMPOSSIBLE = math.log(1e-9)  # of the events below, what a healthy run of a million steps does not show


@sign("constant reward", "grade some answers of the bank by hand with the reward")
def constant_reward(step: Step, past: Past) -> Evidence:
    rewards = step.rewards
    if len(rewards) < 4 or rewards.min() != rewards.max():
        return None
    value = float(rewards[0])
    if past.reward_means and value == past.highest_reward > past.lowest_reward:
        jump = value - past.reward_means[-1]
        if jump < 0.4 * (past.highest_reward - past.lowest_reward):
            return None  # solved
    return f"all {len(rewards)} samples have the reward {value:g}"


@sign(
    "cloned samples", "the engine draws all samples of a prompt from one seed: check its version and engine.extra_args"
)
def cloned_samples(step: Step, past: Past) -> Evidence:
    """k of n samples are the same tokens, with ln p of them: by chance at most C(n, k) p^(k - 1)."""
    for entry in step.entries:
        length, alike = Counter(entry.response_lengths.tolist()).most_common(1)[0] if entry.num_samples else (0, 0)
        if alike < 2 or 2 * alike < entry.num_samples or length * alike > TOKENS:
            continue
        same = np.flatnonzero(entry.response_lengths == length).tolist()
        rollouts = step.read(entry, same, ("core",)).rollouts
        kinds = Counter(rollout.token_ids.tobytes() for rollout in rollouts)
        ids, copies = kinds.most_common(1)[0]
        logprob = max(float(r.rollout_logprob.sum()) for r in rollouts if r.token_ids.tobytes() == ids)
        if copies > 1 and math.log(math.comb(entry.num_samples, copies)) + (copies - 1) * logprob < IMPOSSIBLE:
            return (
                f"prompt {entry.position}: {copies} of {entry.num_samples} samples are the same {length} tokens, "
                f"each of probability {math.exp(logprob):.1g}"
            )
    return None


@sign("log-probs of another temperature", "the engine must return log-probs after temperature: check engine.extra_args")
def other_temperature(step: Step, past: Past) -> Evidence:
    """Of the engine's lists: the token that they call likeliest must be drawn as often as they say."""
    wanted = step.setting("rollout.temperature", int, float)
    for entry in step.entries:
        if wanted is not None and not math.isclose(entry.temperature, wanted, rel_tol=1e-6):
            return (
                f"prompt {entry.position} was sampled at temperature {entry.temperature:g}, the config has {wanted:g}"
            )
    if not all(entry.topk for entry in step.entries):
        return None
    drawn, said = [np.zeros(0)], [np.zeros(0)]
    for entry, samples in _some(step):
        for rollout in step.read(entry, samples, ("core", "topk")).rollouts:
            if rollout.topk_ids is None or rollout.rollout_topk_logprob is None or rollout.spans is not None:
                continue
            logprobs = np.where(rollout.topk_ids < 0, -np.inf, rollout.rollout_topk_logprob)
            best = logprobs.argmax(axis=1)
            rows = np.arange(len(best))
            drawn.append(rollout.topk_ids[rows, best] == rollout.token_ids)
            said.append(np.exp(logprobs[rows, best]))
    hits, chance = np.concatenate(drawn), np.concatenate(said)
    spread = math.sqrt(float((chance * (1 - chance)).clip(0).sum()) + 1)
    off = float(hits.sum() - chance.sum())
    if len(hits) < 100 or abs(off) < 7 * spread or abs(off) < 0.02 * len(hits):
        return None
    return f"the likeliest token was drawn {hits.mean():.0%} of the time, its log-probs say {chance.mean():.0%}"


@sign("routes missing", "the engine must return the experts of every token: docs/engines.md")
def routes_missing(step: Step, past: Past) -> Evidence:
    if not step.setting("rollout.routing_replay"):
        return None
    without = sum(entry.routing is None for entry in step.entries)
    if without:
        return f"{without} of {len(step.entries)} groups hold no experts"
    share = step.value("moe/routing_replay_disagreement")
    return (
        None if share is None or share < 0.5 else f"the trainer would have chosen {share:.0%} of the experts otherwise"
    )


@sign("wrong special tokens", "check data.chat_template and data.prompt_template by `data inspect`")
def wrong_special_tokens(step: Step, past: Past) -> Evidence:
    vocabulary = step.vocabulary
    if vocabulary is None:
        return None
    for entry, _ in _some(step):
        prompt = step.read(entry, (), ("core",)).prompt
        ids = prompt.token_ids.tolist()
        if len(ids) > 1 and ids[0] == ids[1] and ids[0] in vocabulary.special:
            return f"prompt {entry.position} begins with {vocabulary.special[ids[0]]} twice"
        if foreign := vocabulary.foreign_markers(prompt.text):
            return f"prompt {entry.position} has {', '.join(foreign[:3])}, which this tokenizer does not know"
        for id_, content in vocabulary.special.items():
            if prompt.text.count(content) > ids.count(id_):
                return f"prompt {entry.position} spells {content} in letters: it is not encoded as one token"
    return None


@sign("tokenizer of another model", "model.path must hold the tokenizer that the bank was filled with")
def other_tokenizer(step: Step, past: Past) -> Evidence:
    vocabulary = step.vocabulary
    if vocabulary is None or step.setting("data.overlong") == "truncate":
        return None
    for entry, samples in _some(step):
        group = step.read(entry, samples[:1], ("core",))
        ids = group.prompt.token_ids.tolist()
        if ids not in vocabulary.encodings(group.prompt.text):
            return f"prompt {entry.position}: its token ids are not those that model.path's tokenizer makes of its text"
        largest = max((int(r.token_ids.max()) for r in group.rollouts if len(r.token_ids)), default=0)
        if largest >= vocabulary.size:
            return f"prompt {entry.position}: token {largest} was sampled, the tokenizer has {vocabulary.size}"
    return None


def _some(step: Step) -> list[tuple[BankEntry, list[int]]]:
    """The first groups with as many of their samples as there is time for."""
    left, found = TOKENS, []
    for entry in step.entries[:GROUPS]:
        ends = np.cumsum(entry.response_lengths)
        count = int(np.searchsorted(ends, left, side="right"))
        found.append((entry, list(range(count))))
        left -= int(ends[count - 1]) if count else 0
    return found
