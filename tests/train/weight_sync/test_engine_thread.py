"""The trainer's connections to engines end with it, also when an error ends it."""

import subprocess
import sys

TRAINER = """
import aiohttp
from dppo_megatron.train.actor.checkpoint.directory import CheckpointError
from dppo_megatron.train.weight_sync.engine_thread import EngineThread

class Engines:
    async def connect(self):
        self.session = aiohttp.ClientSession()

    async def close(self):
        await self.session.close()
        print("closed")

def train():
    ended, left = EngineThread(Engines()), EngineThread(Engines())
    for engines in (ended, left):
        engines.start(Engines.connect).result()
    ended.close()
    raise CheckpointError("step-000004 could not be written")

try:
    train()
except CheckpointError as error:
    print(error)
"""


def test_sessions_are_closed_once_however_the_trainer_ends():
    ended = subprocess.run([sys.executable, "-c", TRAINER], capture_output=True, text=True, timeout=900)
    assert ended.stdout.splitlines() == ["closed", "step-000004 could not be written", "closed"]
    assert ended.stderr == ""
