"""Makes the chains' task and its start policy, once for all runs of a study.

python studies/chains/prepare.py                      # runs/chains, level easy
python studies/chains/prepare.py --level hard --seed 2
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from chains import LEVELS, make_task

ROOT = Path("runs/chains")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", choices=LEVELS, default="easy")
    parser.add_argument("--seed", type=int, default=1, help="of the task, the random model and the text's order")
    arguments = parser.parse_args()
    for made in (ROOT / "task", ROOT / "warmup"):
        shutil.rmtree(made, ignore_errors=True)
    make_task(ROOT / "task", arguments.level, arguments.seed)
    warmup = [sys.executable, "-m", "dppo_megatron", "train", str(Path(__file__).parent / "warmup.yaml")]
    return subprocess.run([*warmup, "--set", f"run.seed={arguments.seed}"]).returncode


if __name__ == "__main__":
    sys.exit(main())
