"""Makes a tiny policy, a bank that the policy sampled, and configs that train on the bank."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dppo_megatron.bank import BankWriter
from dppo_megatron.config import Config
from dppo_megatron.run.checks import settings_problems
from dppo_megatron.types import Prompt, Rollout, RolloutGroup
from tests.support.actor_cases import QWEN3
from tests.support.configs import make_config

VOCAB, EOS, K, TEMPERATURE = 23, 0, 4, 0.9  # not a multiple of the number of ranks, so the head is padded
STEPS, GROUPS, SAMPLES, LONGEST = 3, 4, 4, 6
MODEL = {**QWEN3, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": VOCAB, "max_position_embeddings": 64}


def make_task(directory: Path) -> Path:
    """Write model/ and bank/ below `directory`."""
    from transformers import AutoModelForCausalLM

    from dppo_megatron.hf import make_random_hf_model

    make_random_hf_model(directory / "model", MODEL, seed=1)
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    with BankWriter(directory / "bank", GROUPS) as bank:
        for position in range(STEPS * GROUPS):
            bank.append(sample_group(model, position, generator))
    return directory


def write_config_json(directory: Path, **fields: Any) -> Path:
    """Write MODEL's config.json to model/ below `directory`, for code that reads no weights."""
    (directory / "model").mkdir(parents=True, exist_ok=True)
    (directory / "model" / "config.json").write_text(json.dumps(MODEL | fields))
    return directory / "model"


@torch.no_grad()
def sample_group(model: Any, position: int, generator: torch.Generator) -> RolloutGroup:
    """Sample a group token by token from `model`, with its log-probs. The reward counts tokens 1 and 2."""
    prompt = Prompt(position, position, np.array([3 + position % 5, 4], np.int32), f"prompt {position}", "1 2")
    rollouts = []
    for _ in range(SAMPLES):
        tokens, logprobs, ids, topk_logprobs, taught = list(prompt.token_ids), [], [], [], []
        for _ in range(LONGEST):
            row = (model(torch.tensor([tokens])).logits[0, -1] / TEMPERATURE).log_softmax(-1)
            token = int(torch.multinomial(row.exp(), 1, generator=generator))
            top = row.topk(K)
            taught.append((row / 2).log_softmax(-1))
            tokens.append(token)
            logprobs.append(row[token])
            ids.append(top.indices)
            topk_logprobs.append(top.values)
            if token == EOS:
                break
        size = len(logprobs)
        rollouts.append(
            Rollout(
                token_ids=np.array(tokens[2:], np.int32),
                rollout_logprob=torch.stack(logprobs).numpy(),
                versions=np.zeros(size, np.int32),
                finish_reason="stop" if tokens[-1] == EOS else "length",
                topk_ids=torch.stack(ids).int().numpy(),
                rollout_topk_logprob=torch.stack(topk_logprobs).numpy(),
                # A teacher with a flatter distribution.
                teacher_logprob=torch.stack([row[t] for row, t in zip(taught, tokens[2:], strict=True)]).numpy(),
                teacher_ids=torch.stack([row.topk(K).indices for row in taught]).int().numpy(),
                teacher_topk_logprob=torch.stack([row.topk(K).values for row in taught]).numpy(),
            )
        )
    rewards = np.array([np.isin(r.token_ids, (1, 2)).sum() + 0.1 * i for i, r in enumerate(rollouts)], np.float32)
    return RolloutGroup(prompt, tuple(rollouts), rewards, np.zeros(SAMPLES, bool), TEMPERATURE)


def task_config(task: Path, **sections: dict[str, Any]) -> Config:
    """Return a config that trains on the task's bank, updated by `sections` section by section."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": str(task / "run"), "seed": 3},
        "model": {"path": str(task / "model"), "dtype": "fp32"},
        "parallel": {"timeout_s": 60},
        "optimizer": {"lr": 1e-2, "grad_clip": 0},
        "objective": {"name": "dppo_binary_tv"},
        "train": {"steps": STEPS, "updates_per_step": 2, "micro_batch_tokens": 32},
        "data": {"train": "unused.jsonl"},
        "rollout": {
            "bank": str(task / "bank"),
            "prompts_per_step": GROUPS,
            "group_size": SAMPLES,
            "max_response_tokens": LONGEST,
            "temperature": TEMPERATURE,
            "topk_logprobs": K,
        },
    }
    for section, changes in sections.items():
        tree[section] = tree.get(section, {}) | changes
    config = make_config(**tree)
    assert not settings_problems(config)
    return config
