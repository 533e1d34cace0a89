"""`train COPY/config.yaml --resume` must train the copy of a run, not the original. About two minutes on a CPU.

Run from a clone's root: PYTHONPATH=$PWD python tests/reproducers/copied_run.py
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

work = Path(tempfile.mkdtemp())
env = os.environ | {"OMP_NUM_THREADS": "1"}


def dppo(*arguments):
    command = [sys.executable, "-m", "dppo_megatron", *arguments]
    done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True)
    print(" ".join(arguments), "| exit code", done.returncode)
    if done.returncode:
        print(done.stdout, done.stderr)
    return done


def steps(run):
    return sum('"train/loss"' in line for line in (work / run / "metrics.jsonl").read_text().splitlines())


dppo("init", "first")
dppo("train", "first/config.yaml", "--set", "train.steps=2")
shutil.copytree(work / "first/run", work / "first/backup")
done = dppo("train", "first/backup/config.yaml", "--resume", "--set", "train.steps=3")
print("steps: original", steps("first/run"), "copy", steps("first/backup"))
sys.exit(done.returncode or steps("first/run") != 2 or steps("first/backup") != 3)
