"""A run that is suspended for longer than reward.timeout_s must keep the rewards that are being computed (15 s).

Run from a clone's root: PYTHONPATH=. python tests/reproducers/suspended_reward.py
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

REWARD = """import time
def slow(prompt, response_text):  # longer than the time before the suspension
    end = time.process_time() + (0.4 if response_text == "later" else 0.01)
    while time.process_time() < end: pass
    return 1.0
"""
CHILD = """import asyncio, numpy as np
from dppo_megatron.config.schema import RewardConfig
from dppo_megatron.rollout.rewards import RewardPool
from dppo_megatron.types import Prompt
async def main():
    with RewardPool(RewardConfig(name="slowreward:slow", timeout_s=4, workers=1)) as pool:
        prompt = Prompt(0, 0, np.array([1], np.int32), "x", "y")
        await pool.score(prompt, ["first"])
        print("ready", flush=True)
        rewards, failed = await pool.score(prompt, ["later"])
        print("reward", rewards, "failed", failed, pool.last_failure, flush=True)
if __name__ == "__main__": asyncio.run(main())
"""
with tempfile.TemporaryDirectory() as directory:
    Path(directory, "slowreward.py").write_text(REWARD)
    Path(directory, "child.py").write_text(CHILD)
    paths = os.pathsep.join([os.environ.get("PYTHONPATH", "."), directory, os.getcwd()])
    child = subprocess.Popen(
        [sys.executable, f"{directory}/child.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    child.stdout.readline()
    time.sleep(0.2)
    family = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
    for process in family:
        process.suspend()
    time.sleep(7)
    for process in family:
        process.resume()
    said = child.stdout.read()
    print(said)
    child.wait()
    sys.exit("failed [False]" not in said)
