"""Settings without an effect, or with a wrong one, are rejected; unusual settings with a defined effect are accepted.

    PYTHONPATH=. python tests/reproducers/accepted_settings.py

Reads no model and no data. Accepted, with the reason:

- a horizon of 1e9 and a ratio cap of 1e-9 scale all loss weights by one factor, and Adam divides by the size of the
  gradient. Every positive number is a possible horizon or cap (V-trace's cap is 1, that of `ess_adaptive` is less)
- answers of one token are answers, e.g. to a question of yes or no
- an overlong buffer as long as the response is a penalty that grows linearly from the first token
"""

from __future__ import annotations

import sys

from dppo_megatron.config import ConfigError, read_config
from dppo_megatron.run.checks import settings_problems

TRAIN = "runs/quickstart/task/train.jsonl"
REJECTED = {
    "temperature 0: all samples of a group are equal": ["rollout.temperature=0"],
    "top_k 1: all samples of a group are equal": ["rollout.top_k=1", "rollout.top_p=0.5"],
    "top_p below 1 / top_k: only the most likely token is left": ["rollout.top_k=50", "rollout.top_p=0.01"],
    "min_p 1: only the most likely token is left": ["rollout.top_k=50", "rollout.min_p=1"],
    "held-out set is the training set": [f"data.eval={TRAIN}"],
    "held-out set is the training set, spelled differently": [
        "data.eval=runs/./quickstart/../quickstart/task/train.jsonl"
    ],
    "a named set is the training set": [f"eval.sets.a.path={TRAIN}"],
    "a held-out set is another training file": ["data.more=[{path: more.jsonl}]", "data.eval=more.jsonl"],
    "pass_reward 2 with a grader of 0 and 1: accuracy is 0": ["eval.pass_reward=2"],
    "pass_reward 0 with a grader of 0 and 1: accuracy is 1": ["eval.pass_reward=0"],
    "pass_reward 1 with a weight of 0.5: accuracy is 0": ["reward.terms=[{name: gsm8k, weight: 0.5}]"],
    "no weight check: tolerance 1000 nats, fingerprints off": [
        "weight_sync.probe_tolerance=1000",
        "weight_sync.fingerprint=false",
    ],
    "warm-up of 100,000 updates in a run of 80": ["optimizer.warmup_updates=100000"],
    "min_lr without a decay": ["optimizer.min_lr=1e-6"],
    "a profile of a step after the last": ["profile.steps=[41]"],
}
ACCEPTED = {
    "horizon 1e9: loss weights 1e-9 times as large": ["objective.horizon=1000000000"],
    "answers of 1 token": ["rollout.max_response_tokens=1"],
    "ratio cap 1e-9": ["objective.settings={delta: 0.2, ratio_cap: 1.0e-9}"],
    "overlong buffer as long as the response": ["reward.overlong_buffer=4"],
    "top_k 2": ["rollout.top_k=2"],
    "a warm-up as long as the run": ["optimizer.warmup_updates=80"],
    "tolerance 1000 with fingerprints": ["weight_sync.probe_tolerance=1000"],
    "fingerprints off with the default tolerance": ["weight_sync.fingerprint=false"],
    "pass_reward 2 with a reward of unknown range": ["eval.pass_reward=2", "reward.name=my_rewards:reward"],
}


def rejected(overrides: list[str]) -> bool:
    try:
        return bool(settings_problems(read_config("examples/quickstart/config.yaml", overrides)))
    except ConfigError:
        return True


if __name__ == "__main__":
    wrong = 0
    for expected, cases in ((True, REJECTED), (False, ACCEPTED)):
        for name, overrides in cases.items():
            found = rejected(overrides)
            wrong += found != expected
            print("rejected" if found else "accepted", name, "" if found == expected else "<- WRONG")
    print(f"WRONG: {wrong} settings" if wrong else "right")
    sys.exit(bool(wrong))
