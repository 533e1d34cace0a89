"""Create the chains task and its start policy, once for all runs of a study.

python studies/chains/prepare.py                      # runs/chains, level easy, about ten minutes on two cores
python studies/chains/prepare.py --level hard --root runs/chains-hard
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from chains import LEVELS, make_task

from dppo_megatron.common.process import with_this_process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", choices=LEVELS, default="easy")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the task, the random model and the order of the text"
    )
    parser.add_argument(
        "--root", type=Path, default="runs/chains", help="directory of task/ and warmup/, which are replaced"
    )
    parser.add_argument("--updates", type=int, default=600, help="updates of the start policy; fewer only for a trial")
    arguments = parser.parse_args()
    task, warmup = arguments.root / "task", arguments.root / "warmup"
    for made in (task, warmup):
        shutil.rmtree(made, ignore_errors=True)
    make_task(task, arguments.level, arguments.seed)
    settings = {
        "run.dir": warmup,
        "run.seed": arguments.seed,
        "model.path": task / "random_model",
        "data.train": task / "warmup.jsonl",
        "train.steps": arguments.updates,
        "optimizer.warmup_updates": min(20, arguments.updates - 1),
    }
    command = [sys.executable, "-m", "dppo_megatron", "train", str(Path(__file__).parent / "warmup.yaml")]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    return subprocess.run(command, preexec_fn=with_this_process()).returncode


if __name__ == "__main__":
    sys.exit(main())
