"""`doctor` and `status` must report a run whose own objective raises in step 3, and one whose trainer was killed.

About two minutes on a CPU. Run from a clone's root: PYTHONPATH=$PWD python tests/reproducers/doctor_after_crash.py
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

work = Path(tempfile.mkdtemp())
env = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "300"}
OBJECTIVE = """
import itertools
from dppo_megatron.objectives import Objective, ObjectiveSettings
calls = itertools.count()
class Crash(Objective):
    def __call__(self, **given):
        if next(calls) > 1:
            raise RuntimeError('bug in step 3')
        return super().__call__(**given)
crash = Crash('crash', ObjectiveSettings(delta=0.15))
"""


def command(*arguments):
    return [sys.executable, "-m", "dppo_megatron", *arguments]


def reported(run, *texts):
    """Return whether both commands show the texts, and doctor exits with 1."""
    kept = {"cwd": work, "env": env, "capture_output": True, "text": True}
    doctor, status = (subprocess.run(command(name, run), **kept) for name in ("doctor", "status"))
    print(f"doctor {doctor.returncode}\n{doctor.stdout}{doctor.stderr}\nstatus\n{status.stdout}{status.stderr}")
    return doctor.returncode == 1 and all(text in doctor.stdout and text in status.stdout for text in texts)


(work / "crashing.py").write_text(OBJECTIVE)
subprocess.run(command("init", "first"), cwd=work, env=env, check=True, capture_output=True)
train = command("train", "first/config.yaml", "--set")
code = subprocess.run([*train, "objective.name=crashing:crash"], cwd=work, env=env, capture_output=True).returncode
raised = reported("first/run", "bug in step 3")

run = subprocess.Popen([*train, "run.dir=killed"], cwd=work, env=env, stdout=subprocess.DEVNULL)
metrics = work / "killed" / "metrics.jsonl"
while run.poll() is None and not (metrics.exists() and b"train/loss" in metrics.read_bytes()):
    time.sleep(0.1)
for child in psutil.Process(run.pid).children():
    if "trainer" in child.cmdline():
        child.send_signal(signal.SIGKILL)
killed = run.wait() == 1 and reported("killed", "killed by SIGKILL")
sys.exit(not (code == 1 and raised and killed))
