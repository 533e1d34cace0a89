"""With published adapters, a policy that teaches itself must not score with the start weights.

Its requests name no adapter on the routes of stock servers, so they must go to the engine's own route, whose server
adds the adapter. Run from a clone's root: PYTHONPATH=. python tests/reproducers/self_teacher_adapter.py
"""

import asyncio
import contextlib
import json
import sys
import tempfile

from aiohttp import web
from aiohttp.test_utils import TestServer

from dppo_megatron.rollout.engines.kinds import build_engine
from dppo_megatron.rollout.engines.protocol import EngineError
from dppo_megatron.rollout.engines.secret import make_secret
from dppo_megatron.rollout.fleet.pool import FixedEngines
from dppo_megatron.rollout.fleet.sampling import Sampler
from dppo_megatron.rollout.orchestrator.teachers import Teachers
from dppo_megatron.run.checks import settings_problems
from dppo_megatron.run_dir import RunDir
from tests.rollout.orchestrator.test_teachers import VOCAB, Encoder, prompt, rollout
from tests.support.configs import make_config

INFO = {
    "version": 3, "vocab_size": 100, "max_model_len": 64, "max_logprobs": 64, "logprobs_mode": "processed_logprobs",
    "dtype": "float32", "model": "m", "engine": "vllm", "running": 0, "problems": [],
}  # fmt: skip


async def paths_of(config):
    """Return the routes, and the fields of each request, that scoring a group asks of the engine."""
    asked = []

    async def reply(request):
        body = await request.read()
        if request.path == "/dppo/info":
            return web.json_response(INFO)
        asked.append((request.path, json.loads(body) if body else {}))
        return web.json_response({"error": "this server only records"}, status=400)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", reply)
    async with TestServer(app) as server:
        engine = build_engine(config, str(server.make_url("")))
        teachers = Teachers(config, Encoder(), VOCAB, Sampler(FixedEngines([engine])))
        with contextlib.suppress(EngineError):
            await teachers.add(prompt(), [rollout([3, 4])])
        await teachers.close()
        await engine.close()
    return asked


with tempfile.TemporaryDirectory() as directory:
    config = make_config(
        run={"dir": directory},
        model={"lora": {"r": 8}},
        weight_sync={"lora": "adapter"},
        engine={"kind": "vllm"},  # SGLang's plug-in answers every request with the policy's adapter
        objective={
            "name": "dppo_binary_tv",
            "settings": {"distillation": "reverse_kl", "distillation_coefficient": 1.0},
        },
        distillation={"topk": 4, "teachers": {"self": {"prompt_template": "{prompt}{answer} "}}},
    )
    print("problems:", settings_problems(config))
    RunDir(config.run.dir).make()
    make_secret(config)
    asked = asyncio.run(paths_of(config))
    print("asks", asked)
    sys.exit(not asked or any(path != "/dppo/generate" or not body.get("scored") for path, body in asked))
