"""Adapt verifiers (v1) tasksets and their environments: set `environment.agent` to `play`."""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from itertools import islice
from typing import Any

from dppo_megatron.rollout.environments.interface import EnvironmentFailed


async def play(
    url: str, api_key: str, task: dict[str, Any], *, env: dict[str, Any], path: str | None = None
) -> float | None:
    """Play task number `idx` (a row column); return verifiers' reward, or None if verifiers gives no reward.

    env: the table `[env]` in verifiers configs, at least {"taskset": {"id": ...}}. Agents get the runtime `subprocess`
    and the harness next to this file, unless their settings or the taskset name others.
    path: the verifiers directory, only for this process.
    """
    if path is not None and os.path.abspath(path) not in sys.path:
        sys.path.insert(0, os.path.abspath(path))
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # tool servers are processes that import the taskset
    from verifiers.v1.clients import EvalClientConfig, ModelContext

    idx, (world, unread_tasks, tasks) = task.get("idx", -1), _load(json.dumps(env, sort_keys=True))
    try:
        tasks.extend(islice(unread_tasks, max(0, idx + 1 - len(tasks))))
    except Exception:
        _load.cache_clear()  # a generator that raised has ended: the next episode would see too few tasks
        raise
    if not 0 <= idx < len(tasks):
        raise EnvironmentFailed("raised", f"idx = {idx}: not a task of {env}; each row of data.train needs its number")
    # The address contains the key; verifiers would send a key from this variable.
    client = EvalClientConfig(base_url=f"{url}/sessions/{api_key}/v1", api_key_var="DPPO_MEGATRON_NO_KEY")
    async with world.serving():
        episode = await world.run_slot(world.slots(tasks[idx])[0], ModelContext(model="policy", client=client))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise EnvironmentFailed("raised", "; ".join(f"{error.type}: {error.message}" for error in errors))
    policy_traces = [trace for trace in episode.traces if trace.agent.config.client == client]
    if len(policy_traces) != 1 or not policy_traces[0].agent.trainable:  # training would include turns of other models
        raise EnvironmentFailed(
            "raised", f"{len(policy_traces)} agents use the policy, expected one, trainable; set `client` of the others"
        )
    return policy_traces[0].reward if policy_traces[0].rewards else None


@cache
def _load(settings: str) -> tuple[Any, Any, list[Any]]:
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils import loaders

    from . import verifiers_harness

    sys.modules["verifiers.v1.harnesses.dppo_megatron"] = verifiers_harness  # verifiers looks harnesses up by this name
    env = json.loads(settings)
    taskset = env["taskset"]["id"]
    for name, seat in agent_config_fields(loaders.env_config_type(taskset, env.get("id", ""))()).items():
        agent_config = env.setdefault(name, {})
        agent_config.setdefault("runtime", {"type": "subprocess"})
        if seat.harness is None and loaders.default_harness_id(taskset) == "bash":
            agent_config.setdefault("harness", {"id": "dppo_megatron"})
    world = loaders.load_environment(loaders.resolve_env_config(env))
    return world, iter(world.taskset), []  # environment, unread tasks, read tasks
