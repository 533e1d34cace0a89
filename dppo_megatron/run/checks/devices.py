"""Checks devices and ports on this machine, and devices in a cluster.

Ranks take the first GPUs. Engines take the next GPUs or, if colocated, the ranks' GPUs. Example: 2 ranks use GPUs
0-1, and 2 engines of 1 GPU use GPUs 2-3, or GPUs 0-1 if colocated.
"""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from dppo_megatron.config import Config, with_settings
from dppo_megatron.errors import ExpectedError
from dppo_megatron.rollout.engines.kinds import kind_of

from .engine import LAST_PORT


def visible_devices() -> list[str]:
    """Return the GPUs this process may use, named as in CUDA_VISIBLE_DEVICES; empty without CUDA."""
    import torch

    count = torch.cuda.device_count()
    named = [d.strip() for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d.strip()]
    return named[:count] if named else [str(index) for index in range(count)]


def require_gpu() -> None:
    """Raise ExpectedError if torch was built for GPUs but sees none: this rank would train on a CPU among GPU ranks."""
    import torch

    if torch.backends.cuda.is_built() and not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise ExpectedError(
            f"no GPU is visible on {socket.gethostname()} (CUDA_VISIBLE_DEVICES: {visible}), and this rank is to train "
            "on one; run nvidia-smi there to find the cause"
        )


def engine_devices(config: Config, index: int, visible: list[str], *, trains: bool = True) -> list[str]:
    """Return engine `index`'s GPUs on this machine, if any. `trains`: ranks use the first GPUs."""
    num_devices, shared = config.engine.devices, config.engine.placement == "colocated" or not trains
    first = (0 if shared else config.parallel.world_size) + index * num_devices
    return visible[first : first + num_devices]


def problems(config: Config) -> list[str]:
    """Return why ranks and started engines do not fit on this machine's GPUs, and unusable hosts and ports."""
    from dppo_megatron.rollout.fleet.registry import port_in_use

    engine, started, agent = config.engine, config.started_engines, config.samples and config.environment.agent
    hosts = {"engine.host": started and engine.host, "environment.host": agent and config.environment.host}
    if absent := {name: host for name, host in hosts.items() if host and port_in_use(host, 0)}:
        return [f"{name} = {host}: not an address of this machine; name one" for name, host in absent.items()]
    ports = range(engine.port, min(engine.port + started, LAST_PORT + 1)) if engine.port else ()
    return gpu_problems(config, visible_devices()) + [
        f"engine.port = {port}: already in use on {engine.host}; choose another, or 0 for a free one"
        for port in ports
        if port_in_use(engine.host, port)
    ]


def unreached(config: Config) -> list[str]:
    """Return a note for each server of `engine.urls` that cannot be reached now. Such a server may start later."""
    out, wait_s = [], config.engine.unavailable_timeout_s
    for url in config.engine.urls if config.samples else ():
        at = urlsplit(url)
        try:
            socket.create_connection((at.hostname, at.port or (443 if at.scheme == "https" else 80)), 2.0).close()
        except OSError as error:
            out.append(f"engine.urls: {url}: {error}; a run waits {wait_s:g} s for it (engine.unavailable_timeout_s)")
    return out


def gpu_problems(config: Config, visible: list[str], *, trains: bool = True) -> list[str]:
    """Return why ranks (if `trains`) and engines do not fit on these GPUs. Without GPUs the CPU computes."""
    engine, engines = config.engine, config.started_engines
    if not visible:
        if config.slurm.gpu is not None:
            return [
                f"slurm.gpu = {config.slurm.gpu}: the run needs GPUs, and {socket.gethostname()} shows none; check "
                "nvidia-smi and torch.version.cuda there, start it by `dppo-megatron slurm` from a login node, or "
                "set it to null for a run on CPUs"
            ]
        if engines and (engine_problems := kind_of(config).cpu_problems(config)):
            return engine_problems
        if not engines or not engine.serves_fp8:
            return []
        return [
            f"engine.quantization = {engine.quantization}: needs a GPU, {engine.kind} does not multiply in FP8 on "
            "CPUs; set it to none, or to fp8_block_emulated to study its mismatch"
        ]
    if engines and (engine_problems := kind_of(config).gpu_problems(config)):
        return engine_problems
    if engines and engine.nodes > 1:
        return [f"engine.nodes = {engine.nodes}: this machine is one node; set it to 1"]
    if not trains:
        if not engines or engine.devices <= len(visible):
            return []
        return [
            f"engine.tensor_parallel = {engine.tensor_parallel}: with engine.pipeline_parallel = "
            f"{engine.pipeline_parallel} an engine needs {engine.devices} GPUs, {len(visible)} are visible; lower one"
        ]
    needed = devices_needed(config)
    if needed <= len(visible):
        return []
    return [
        f"parallel.world_size = {config.parallel.world_size}: with {engines} engines of engine.tensor_parallel = "
        f"{engine.tensor_parallel} the run needs {needed} GPUs, {len(visible)} are visible; lower "
        "one of them, or serve elsewhere and set engine.urls"
    ]


def fit_engines(config: Config, visible: list[str]) -> Config:
    """Return `config` with at most as many engines as fit on `visible` GPUs, if no rank trains.

    Prints the number of engines if it is lowered.
    """
    max_engines = len(visible) // config.engine.devices
    if not max_engines or config.started_engines <= max_engines:
        return config
    print(f"engine.count = {config.engine.count}: {len(visible)} GPUs are visible; lowered to {max_engines}")
    return with_settings(config, engine={"count": max_engines})


def cluster_problems(config: Config, nodes: int, per_node: int) -> list[str]:
    """Return why `nodes` of `per_node` devices are too few for ranks and engines, or too small for one engine."""
    engine, serving, needed = config.engine, config.engine_devices, devices_needed(config)
    if serving and engine.devices_per_node > per_node:
        return [
            f"engine.nodes = {engine.nodes}: an engine has {engine.devices_per_node} devices on each of its nodes, and "
            f"a node has {per_node}; set it to {-(-engine.devices // per_node)}"
        ]
    if needed > nodes * per_node:
        engines = f" and {engine.count} engines of {engine.devices}" if serving else ""
        shared = ", which share devices," if serving and engine.placement == "colocated" else ""
        return [
            f"parallel.world_size = {config.parallel.world_size}: trainer ranks{engines}{shared} need {needed} "
            f"devices, {nodes} x {per_node} are {nodes * per_node}; lower one of them or add nodes"
        ]
    if serving and (slots := _slots(config, nodes, per_node)) < engine.count:
        return [
            f"engine.count = {engine.count}: {nodes} x {per_node} devices with {config.parallel.world_size} trainer "
            f"ranks have room for {slots} engines of {engine.devices_per_node} devices on {engine.nodes} nodes each; "
            "lower it or engine.tensor_parallel"
        ]
    return []


def devices_needed(config: Config) -> int:
    """Return how many devices ranks, started engines and teachers need. Colocated engines share the ranks' devices."""
    teachers = sum(config.distillation.teachers[name].tensor_parallel for name in config.started_teachers)
    if config.engine.placement == "colocated":
        return max(config.parallel.world_size, config.engine_devices) + teachers
    return config.parallel.world_size + config.engine_devices + teachers


def _slots(config: Config, nodes: int, per_node: int) -> int:
    """Return how many engines the free devices can run.

    Ranks fill node after node. Colocated engines may use the ranks' devices. Engines on several nodes need whole nodes.
    Example: 12 ranks on 3 nodes of 8 devices leave 4 + 8 devices, enough for 3 engines of 4 devices or 1 engine of 8.
    """
    full, remainder = divmod(config.parallel.world_size, per_node)
    if config.engine.placement == "colocated":
        full = remainder = 0
    num_devices, span = config.engine.devices_per_node, config.engine.nodes
    free = (nodes - full - bool(remainder)) // span
    return free * (per_node // num_devices) + (bool(remainder) and span == 1) * ((per_node - remainder) // num_devices)
