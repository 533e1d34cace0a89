"""Run every step on one machine: create a task, pretrain a start policy, train it with DPPO, compare the accuracy.

make quickstart                                   # or: python examples/quickstart/run.py
python examples/quickstart/run.py --set objective.name=grpo_clip_higher --set 'objective.settings={}'
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from make_task import make_task

from dppo_megatron.common.process import with_this_process
from dppo_megatron.report.tail import read_records

HERE = Path(__file__).parent
ROOT = Path("runs/quickstart")
TARGET = 0.85


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="seed of the task, the start policy and the run")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="passed to the DPPO run")
    arguments = parser.parse_args()
    started = time.monotonic()
    shutil.rmtree(ROOT, ignore_errors=True)
    make_task(ROOT / "task", seed=arguments.seed)
    seed = f"run.seed={arguments.seed}"
    print("== start policy: supervised on text that often forgets the carry, two Megatron-core ranks", flush=True)
    train(HERE / "warmup.yaml", [seed])
    print("== DPPO: two Megatron-core ranks, an inference server, an orchestrator", flush=True)
    train(HERE / "config.yaml", [seed, *arguments.set])
    evaluations = {
        r["step"]: r["eval/accuracy"] for r in read_records(ROOT / "dppo/metrics.jsonl") if "eval/accuracy" in r
    }
    before, after = evaluations[min(evaluations)], evaluations[max(evaluations)]
    minutes = (time.monotonic() - started) / 60
    print(f"held-out greedy accuracy: {before:.1%} before, {after:.1%} after ({minutes:.1f} minutes in all)")
    if after < TARGET:
        print(f"expected at least {TARGET:.0%} after; see {ROOT / 'dppo/report'}", file=sys.stderr)
        return 1
    return 0


def train(config: Path, overrides: list[str]) -> None:
    command = [sys.executable, "-m", "dppo_megatron", "train", str(config)]
    for override in overrides:
        command += ["--set", override]
    code = subprocess.run(command, preexec_fn=with_this_process()).returncode
    if code:
        sys.exit(code)


if __name__ == "__main__":
    sys.exit(main())
