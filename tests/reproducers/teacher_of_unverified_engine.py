"""A policy that teaches itself (teacher without urls and path) must be scored only by engines that the pool verified.

Run from a clone's root: PYTHONPATH=. python tests/reproducers/teacher_of_unverified_engine.py
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from dppo_megatron.config import with_settings
from dppo_megatron.rollout.orchestrator.teachers import Teachers
from dppo_megatron.run_dir import RunDir
from tests.rollout.orchestrator.test_teachers import Encoder, prompt, rollout
from tests.support.configs import make_config
from tests.support.fakes.fleet import A, B, FakeServer, World

with tempfile.TemporaryDirectory() as directory:
    config = make_config(
        run={"dir": directory + "/run"},
        objective={"name": "dppo_binary_tv", "settings": {"distillation": "sampled", "distillation_coefficient": 1.0}},
        distillation={"topk": 1, "teachers": {"self": {"prompt_template": "{prompt}{answer} "}}},
    )
    checks = {"health_interval_s": 0.05, "health_timeout_s": 0.5, "health_failures": 2, "unavailable_timeout_s": 5.0}
    config = with_settings(config, engine=checks)
    RunDir(Path(config.run.dir)).make()
    world = World(config, {A: FakeServer(), B: FakeServer(misloads=True)})  # B scores as another policy
    world.publish(5, to=(A,))
    wrong = 0

    async def use():
        global wrong
        async with world.live() as sampler:
            teachers = Teachers(config, Encoder(), 1000, sampler)
            for position in range(8):
                (taught,) = await teachers.add(prompt(position=position), [rollout([3, 4])])
                wrong += bool((taught.teacher_logprob != -6).any())
            await teachers.close()

    asyncio.run(use())
    print(f"{wrong} of 8 groups of policy 5 were taught by the engine that the pool gives no request")
    print("requests to the verified engine and to the other:", [len(world.servers[url].asked) for url in (A, B)])
    sys.exit(bool(wrong or world.servers[B].asked))
