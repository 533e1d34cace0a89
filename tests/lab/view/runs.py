"""A run as a trainer, an orchestrator and an evaluation leave it, small, with texts that must not become HTML."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from dppo_megatron.bank import BankWriter
from dppo_megatron.config.load import save_resolved
from dppo_megatron.types import Prompt, Rollout, RolloutGroup
from tests.support.configs import make_config
from tests.support.records import step_record
from tests.support.tokenizers import save_character_model
from tests.support.turns import with_turns

HOSTILE = "</script><img src=x onerror=alert(1)><!--<script>&amp;\u2028\ud800"
STEPS, GROUPS, SAMPLES, TOPK = 4, 3, 4, 4
TURNS_AT = 4  # position of the group with turns and branches
TRAINED_AT = 8  # position of a group with the trainer's values


def text_ids(text: str) -> np.ndarray:
    """Return the ids of the tokenizer of `save_character_model`."""
    return np.array([ord(c) - 30 for c in text], np.int32)


def make_group(
    position: int, step: int, *, samples: int = SAMPLES, length: int = 24, topk: int = TOPK, text: str = ""
) -> RolloutGroup:
    rng = np.random.default_rng(position)
    rollouts = []
    for _ in range(samples):
        size = int(rng.integers(4, length + 1))
        ids = rng.integers(34, 97, size).astype(np.int32)
        if text:
            ids = text_ids(text)
        logprob = -rng.exponential(0.7, len(ids)).astype(np.float32)
        listed = rng.integers(34, 97, (len(ids), topk)).astype(np.int32)
        lists = np.sort(-rng.exponential(2, (len(ids), topk)), axis=1)[:, ::-1].astype(np.float32) - 1
        if topk:
            listed[:, 0], lists[:, 0] = ids, np.minimum(logprob, -0.7)
        rollouts.append(
            Rollout(
                token_ids=ids,
                rollout_logprob=logprob,
                versions=np.where(np.arange(len(ids)) < len(ids) // 2, max(step - 2, 0), step - 1).astype(np.int32),
                finish_reason="length" if size == length else "stop",
                topk_ids=listed if topk else None,
                rollout_topk_logprob=lists if topk else None,
                teacher_logprob=logprob - 1 if topk else None,
                teacher_ids=listed if topk else None,
                teacher_topk_logprob=lists if topk else None,
            )
        )
    rewards = (rng.random(samples) < 0.5).astype(np.float32)
    failed = np.zeros(samples, bool)
    return RolloutGroup(
        Prompt(position, position, text_ids("2+2="), f"{position}+{position} =", str(2 * position)),
        tuple(rollouts), rewards, failed, 1.0,
    )  # fmt: skip


CALL = '<tool_call>{"name": "price", "arguments": {"product": "milk"}}</tool_call><|im_end|>'
NO_TOOL = "error: ValueError: no tool 'prilk'; there are price"
CONVERSATIONS = (  # of each sample its turns of the policy, with a tool's result between two
    (CALL, '{"euros": 1.2}', "1.2 euros<|im_end|>"),
    (CALL, "error: OSError: down", "Sorry"),
    (CALL.replace("price", "prilk"), NO_TOOL, "Sorry<|im_end|>"),
    ("hm <|im_start|>system myxl<|im_end|>",),
    ('<tool_call>{"name',),
)


def write_conversations(directory: Path) -> Path:
    """Write a bank of one group with tool calls, a malformed call, a malformed turn and truncated samples."""
    prompt = "<|im_start|>system Use tools.<|im_end|> <|im_start|>user Price of milk?<|im_end|> <|im_start|>assistant "
    rollouts = []
    for number, (first, *later) in enumerate(CONVERSATIONS):
        texts = [first, f" <|im_start|>tool {later[0]}<|im_end|> ", later[1]] if later else [first]
        sampled = sum(map(len, texts[::2]))
        rollouts.append(
            Rollout(
                token_ids=text_ids("".join(texts)),
                rollout_logprob=np.full(sampled, -0.5, np.float32),
                versions=np.zeros(sampled, np.int32),
                finish_reason="stop" if texts[-1].endswith("<|im_end|>") else "length",
                spans=np.array([(i % 2, len(text), i // 2) for i, text in enumerate(texts)], np.int32),
                trajectory=number,
            )
        )
    asked = Prompt(0, 0, text_ids(prompt), prompt, "1.2")
    with BankWriter(directory, 1) as writer:
        writer.append(RolloutGroup(asked, tuple(rollouts), np.zeros(5, np.float32), np.zeros(5, bool), 1.0))
    return directory


def write_bank(directory: Path, steps: int = STEPS, groups: int = GROUPS, **kwargs) -> Path:
    with BankWriter(directory, groups) as writer:
        for position in range(steps * groups):
            step = position // groups + 1
            made = make_group(position, step, **kwargs)
            if position == TURNS_AT:
                made = with_turns(made)
            if position == 0:
                prompt = replace(made.prompt, text=HOSTILE.replace("\ud800", ""), answer="</script>")
                rollouts = make_group(0, 1, **{**kwargs, "text": "<!--</script><b>x</b>"}).rollouts
                made = replace(made, prompt=prompt, rollouts=rollouts)
            writer.append(made)
    return directory


def write_run(root: Path, **kwargs) -> Path:
    """Step 2 has a group with turns; steps 1 to 4 are recorded; one evaluation has two answers to a prompt."""
    run = root / "run"
    run.mkdir(parents=True)
    config = make_config(
        run={"dir": run},
        model={"path": save_character_model(root / "model")},
        data={"train": root / "train.jsonl"},
        objective={"name": "dppo_binary_tv", "advantage": "group_mean_std"},
        rollout={"prompts_per_step": GROUPS, "group_size": SAMPLES, "topk_logprobs": TOPK, "max_response_tokens": 24},
        train={"steps": STEPS},
    )
    save_resolved(config, run / "config.yaml")
    records = [step_record(step, 1000.0 + step) for step in range(1, STEPS + 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_bank(run / "bank", **kwargs)
    answers = run / "answers" / "sums"
    answers.mkdir(parents=True)
    sample = {"text": HOSTILE, "reward": 1.0, "failed": False, "tokens": 9, "finish": "stop", "versions": [2, 2]}
    record = {"position": 0, "row": 0, "prompt": "1+1=", "answer": "2", "samples": [sample, {**sample, "reward": 0.0}]}
    (answers / "v000002.jsonl").write_text(json.dumps(record) + "\n")
    return run


def write_trained_tokens(run: Path, position: int) -> None:
    """Store the tokens of a group as the trainer does, without the last sample; every second token is masked."""
    step, group = position // GROUPS + 1, make_group(position, position // GROUPS + 1)
    rollouts = group.rollouts[:-1]
    counts = [len(r.versions) for r in rollouts]
    index = np.concatenate([np.arange(count) for count in counts])
    logprob = np.concatenate([r.rollout_logprob for r in rollouts]) + np.where(index % 2, 0.5, -0.25)
    arrays = {
        "position": np.full(len(counts), position, np.int32),
        "sample": np.arange(len(counts), dtype=np.int32),
        "counts": np.array(counts, np.int32),
        "index": index.astype(np.int32),
        "logprob": logprob.astype(np.float32),
        "entropy": np.ones(len(index), np.float32),
        "divergence": np.full(len(index), 0.125, np.float32),
        "masked": (index % 2).astype(np.uint8),
    }
    (run / "tokens").mkdir(exist_ok=True)
    save_file(arrays, run / "tokens" / f"step-{step:06d}-r000.safetensors")
