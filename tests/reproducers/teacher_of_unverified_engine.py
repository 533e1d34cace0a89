"""A policy that teaches itself (teacher without urls and path) must be scored only by engines that the pool verified.

Run from a clone's root: PYTHONPATH=. python tests/reproducers/teacher_of_unverified_engine.py
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from dppo_megatron.config import with_settings
from dppo_megatron.orchestrator.teachers import Teachers
from dppo_megatron.run_dir import RunDir
from dppo_megatron.types import Prompt, Rollout
from tests.support.configs import make_config
from tests.support.fakes.fleet import A, B, FakeServer, World


class Tokenizer:
    chat_template = None

    def encode(self, text, add_special_tokens=False):
        return [7, 8]


with tempfile.TemporaryDirectory() as directory:
    config = make_config(
        run={"dir": directory + "/run"},
        objective={
            "name": "dppo_binary_tv",
            "settings": {"distillation": "sampled", "distillation_coefficient": 1.0},
        },
        distillation={"topk": 1, "teachers": {"self": {"prompt_template": "{prompt}{answer} "}}},
    )
    checks = {"health_interval_s": 0.05, "health_timeout_s": 0.5, "health_failures": 2, "unavailable_timeout_s": 5.0}
    config = with_settings(config, engine=checks)
    RunDir(Path(config.run.dir)).make()
    world = World(config, {A: FakeServer(), B: FakeServer(misloads=True)})  # B scores as another policy
    world.publish(5, to=(A,))
    wrong = 0

    async def use(sampler):
        global wrong
        teachers = Teachers(config, Tokenizer(), 1000, sampler)
        for position in range(8):
            prompt = Prompt(position, 0, np.array([7, 8], np.int32), "12+34=", "46", {"prompt": "12+34="})
            sample = Rollout(np.array([3, 4], np.int32), np.full(2, -1, np.float32), np.full(2, 5, np.int32), "stop")
            (taught,) = await teachers.add(prompt, [sample])
            wrong += bool((taught.teacher_logprob != -6).any())
        await teachers.close()

    world.live(use)
    print(f"{wrong} of 8 groups of policy 5 were taught by the engine that the pool gives no request")
    print("requests to the verified engine and to the other:", [len(world.servers[url].asked) for url in (A, B)])
    sys.exit(bool(wrong or world.servers[B].asked))
