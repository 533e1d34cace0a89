"""`train --resume` examines all earlier steps before it starts a process: the time must not grow with their square.

Run from a clone's root: PYTHONPATH=. python tests/reproducers/doctor_quadratic.py
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from dppo_megatron.config import save_resolved
from dppo_megatron.report.doctor import Examination
from tests.support.configs import make_config

NAMES = ["train/loss", "rollout/reward_mean", "mismatch/kl", *(f"other/{i}" for i in range(20))]
seconds = []
for steps in (500, 1000, 2000, 4000):
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory)
        save_resolved(make_config(run={"dir": directory}), run / "config.yaml")
        rows = (
            {"step": s, **{name: 0.5 + (s * 7 + i) % 11 / 10 for i, name in enumerate(NAMES)}}
            for s in range(1, steps + 1)
        )
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        began = time.process_time()
        examination = Examination(run)
        examination.advance(rollouts=False)
        seconds.append(time.process_time() - began)
        print(f"{examination.examined:5d} steps: {seconds[-1]:6.2f} s of CPU before the first process starts")
sys.exit(seconds[-1] > 2 * 8 * seconds[0])  # eight times the steps
