"""Makes groups with several turns and branches from groups of responses."""

from dataclasses import replace

import numpy as np

from dppo_megatron.types import ENVIRONMENT, INHERITED, POLICY, Rollout, RolloutGroup

OF_POLICY = ("rollout_logprob", "versions", "topk_ids", "rollout_topk_logprob", "teacher_logprob", "teacher_ids",
             "teacher_topk_logprob")  # fmt: skip


def with_turns(group: RolloutGroup, seed: int = 0) -> RolloutGroup:
    """Split every response into turns with an environment reply in between. The first response gets two branches.

    Responses with fewer than 4 tokens are not split. Branches have the trajectory's reward.
    """
    rng = np.random.default_rng([seed, group.prompt.position])
    rollouts, rewards = [], []
    for number, (rollout, reward) in enumerate(zip(group.rollouts, group.rewards, strict=True)):
        rollout = replace(rollout, trajectory=number)
        branches = [rollout]
        if len(rollout.token_ids) >= 4:
            a, b = sorted(rng.choice(np.arange(1, len(rollout.token_ids)), 2, replace=False))
            end = len(rollout.token_ids)
            branches = [_spanned(rollout, [(POLICY, a, 0), (ENVIRONMENT, b - a, 0), (POLICY, end - b, 1)])]
            if number == 0:  # the second branch keeps the first turn, and has other tokens after it
                other = replace(rollout, token_ids=np.concatenate([rollout.token_ids[:a], rollout.token_ids[a:][::-1]]))
                branches.append(_spanned(other, [(INHERITED, a, 0), (ENVIRONMENT, b - a, 0), (POLICY, end - b, 1)]))
        rollouts += branches
        rewards += [reward] * len(branches)
    failed = np.zeros(len(rollouts), np.bool_)
    return replace(group, rollouts=tuple(rollouts), rewards=np.array(rewards, np.float32), reward_failed=failed)


def _spanned(rollout: Rollout, spans: list[tuple[int, int, int]]) -> Rollout:
    """Keep columns only for tokens that the policy sampled."""
    rows = np.array(spans, np.int32)
    own = np.repeat(rows[:, 0] == POLICY, rows[:, 1])
    kept = {name: None if (of := getattr(rollout, name)) is None else of[own] for name in OF_POLICY}
    return replace(rollout, spans=rows, **kept)
