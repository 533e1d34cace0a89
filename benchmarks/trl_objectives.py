"""Compare our objectives inside TRL's GRPOTrainer with TRL's own loss, on the quickstart's sums.

    .venv/bin/python benchmarks/trl_objectives.py runs/trl     # in the environment of `make test-integrations`

Each run has 12 steps with the quickstart's start policy, prompts and batch: 64 prompts of 16 samples, two updates, lr
1e-4, at most 4 tokens. It uses TRL's `dr_grpo` aggregation and rewards centred by group; TRL samples with transformers.
Top-K lists have 8 of the 16 tokens of the vocabulary. The result is the greedy accuracy on the 500 held-out sums.

The rule, set before the first run: an objective passes if its accuracy after the 12 steps is at least that of TRL's own
loss minus 2 points. One standard error of a difference of two shares of 500 near 90 % is 1.9 points.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PYTHON = Path(__file__).parents[1] / ".venv-integrations" / "bin" / "python"
METHODS = ("TRL's own", "dppo_binary_tv", "drpo_tr", "score_centering")
STEPS, PROMPTS, SAMPLES, UPDATES, RESPONSE, ALLOWED = 12, 64, 16, 2, 4, 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="directory of the start policy and the runs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--method", choices=METHODS, help="train this method in this process, which has TRL")
    parser.add_argument("--python", type=Path, default=PYTHON, help="interpreter with TRL")
    parser.add_argument(
        "--set", action="append", default=[], help="setting of the start policy's run, as for `train --set`"
    )
    arguments = parser.parse_args()
    if arguments.method:
        print(json.dumps(run(arguments.root, arguments.method, arguments.seed)))
        return 0
    from on_quickstart import machine, make_start_policy

    if not (arguments.root / "warmup" / "model").exists():
        make_start_policy(arguments.root, arguments.set, arguments.seed)
    print(f"{machine()}; seed {arguments.seed}, {STEPS} steps")
    print(f"{'loss':<18} {'before':>7} {'after':>7} {'seconds':>8}")
    after = {}
    for method in METHODS:
        command = [arguments.python, __file__, arguments.root, "--seed", str(arguments.seed), "--method", method]
        done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True)
        if done.returncode:
            return done.returncode
        found = json.loads(done.stdout.splitlines()[-1])
        after[method] = found["after"]
        print(f"{method:<18} {found['before']:>7.1%} {found['after']:>7.1%} {found['seconds']:>8.0f}", flush=True)
    short = [name for name, accuracy in after.items() if accuracy < after[METHODS[0]] - ALLOWED]
    print(f"short of TRL's own loss by more than {ALLOWED:.0%}: {', '.join(short) or 'none'}")
    return len(short)


def run(root: Path, method: str, seed: int) -> dict[str, float]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from dppo_megatron.integrations.trl import ObjectiveTrainer

    start = str(root / "warmup" / "model")
    tokenizer = AutoTokenizer.from_pretrained(start)
    model = AutoModelForCausalLM.from_pretrained(start, dtype="float32")
    heldout = [json.loads(line) for line in (root / "task" / "heldout.jsonl").read_text().splitlines()]
    before = accuracy(model, tokenizer, heldout)
    arguments = GRPOConfig(
        output_dir=str(root / "trl"),
        per_device_train_batch_size=PROMPTS * SAMPLES // UPDATES,
        steps_per_generation=UPDATES,
        num_generations=SAMPLES,
        max_completion_length=RESPONSE,
        max_steps=STEPS * UPDATES,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        loss_type="dr_grpo",
        scale_rewards="none",
        seed=seed,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=UPDATES,
    )
    cls, own = (GRPOTrainer, {}) if method == METHODS[0] else (ObjectiveTrainer, {"objective": method, "topk": 8})
    trainer = cls(
        model,
        right,
        args=arguments,
        train_dataset=Dataset.from_json(str(root / "task" / "train.jsonl"), cache_dir=str(root / "datasets")),
        processing_class=tokenizer,
        **own,
    )
    started = time.monotonic()
    trainer.train()
    return {
        "before": before,
        "after": accuracy(trainer.model, tokenizer, heldout),
        "seconds": time.monotonic() - started,
    }


def right(completions: list[str], answer: list[str], **_: object) -> list[float]:
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]


def accuracy(
    model: Any,
    tokenizer: Any,
    rows: list[dict[str, Any]],
    response: int = RESPONSE,
    reward: Callable[..., list[float]] = right,
) -> float:
    """Return the accuracy of greedy answers of at most `response` tokens to texts or conversations."""
    prompts, conversations = [row["prompt"] for row in rows], isinstance(rows[0]["prompt"], list)
    if conversations:
        prompts = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
    tokens = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    tokens.pop("token_type_ids", None)
    ids = model.eval().generate(**tokens, max_new_tokens=response, do_sample=False)
    model.train()
    texts = tokenizer.batch_decode(ids[:, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [[{"role": "assistant", "content": text}] for text in texts] if conversations else texts
    return sum(reward(answers, answer=[row["answer"] for row in rows])) / len(rows)


if __name__ == "__main__":
    sys.exit(main())
