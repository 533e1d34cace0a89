"""Runs of six steps with a bank, written in milliseconds, whose rows and groups a test may change."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import yaml

from dppo_megatron.bank import BankWriter
from dppo_megatron.types import Prompt, Rollout, RolloutGroup

STEPS, GROUPS, SAMPLES, PLANTED, VOCAB = 6, 2, 8, 4, 97
Groups = list[RolloutGroup]
Row = dict[str, float | None]

HEALTHY_ROW: Row = {
    "train/loss": 0.01,
    "train/grad_norm": 0.5,
    "train/entropy": 1.0,
    "train/nonfinite_tokens": 0.0,
    "train/skipped_updates": 0.0,
    "policy/masked_share": 0.02,
    "mismatch/kl": 1e-4,
    "moe/routing_replay_disagreement": 0.01,
    "rollout/reward_failed": 0.0,
    "rollout/response_tokens_mean": 40.0,
    "rollout/truncated_share": 0.05,
    "rollout/groups_without_signal": 0.0,
    "rollout/staleness_max": 0.0,
    "time/step_s": 1.0,
}


def routes(tokens: int) -> np.ndarray:
    """Return routes of two layers to the first two experts."""
    return np.tile(np.arange(2, dtype=np.uint8), (tokens, 2, 1))


@functools.cache
def group(model: Path, position: int, step: int, *, length: int = 40, topk: int = 4, experts: bool = True):
    from tokenizers import Tokenizer

    rng = np.random.default_rng(position)
    text = f"{position} + 1 ="
    ids = np.array(Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids, np.int32)
    rollouts = []
    for _ in range(SAMPLES):
        probs = rng.dirichlet(np.full(VOCAB, 0.05), size=length)
        tokens = np.array([rng.choice(VOCAB, p=row) for row in probs], np.int32)
        best = np.argsort(-probs, axis=1)[:, :topk].astype(np.int32)
        with np.errstate(divide="ignore"):
            logprobs = np.log(probs).clip(-80).astype(np.float32)
        rollouts.append(
            Rollout(
                token_ids=tokens,
                rollout_logprob=np.take_along_axis(logprobs, tokens[:, None], 1)[:, 0],
                versions=np.full(length, step - 1, np.int32),
                finish_reason="stop",
                topk_ids=best,
                rollout_topk_logprob=np.take_along_axis(logprobs, best, 1),
                routed_experts=routes(len(ids) + length - 1) if experts else None,
            )
        )
    rewards = (rng.random(SAMPLES) < 0.3 + 0.05 * step).astype(np.float32)
    rewards[:2] = 0, 1
    return RolloutGroup(
        Prompt(position, position, ids, text, "2"), tuple(rollouts), rewards, np.zeros(SAMPLES, bool), 1.0
    )


def write_run(
    root: Path,
    model: Path,
    change: Callable[[int, Row, Groups], Groups | None] = lambda step, row, groups: None,
    *,
    trainer: str = "bf16",
    engine: str = "bf16",
) -> Path:
    """`change(step, row, groups)` alters the row in place and may return other groups. trainer, engine: dtypes."""
    run = root / "run"
    run.mkdir()
    config = {
        "model": {"path": str(model), "dtype": trainer},
        "engine": {"dtype": engine},
        "objective": {"name": "dppo_binary_tv"},
        "optimizer": {"lr": 1e-4},
        "rollout": {"prompts_per_step": GROUPS, "temperature": 1.0, "max_staleness": 1, "routing_replay": True},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    lines = []
    with BankWriter(run / "bank", GROUPS) as writer:
        for step in range(1, STEPS + 1):
            groups = [group(model, GROUPS * (step - 1) + i, step) for i in range(GROUPS)]
            row = HEALTHY_ROW | {"step": step, "time": 1000.0 + step}
            groups = change(step, row, groups) or groups
            row.setdefault("rollout/reward_mean", float(np.mean([g.rewards for g in groups])))
            lines.append(json.dumps(row) + "\n")
            for each in groups:
                writer.append(each)
    (run / "metrics.jsonl").write_text("".join(lines))
    return run
