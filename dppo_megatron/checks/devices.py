"""Rules of this machine: free ports, and GPUs. Ranks take the first ones, engines the next or, colocated, the same."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from dppo_megatron.config import Config
from dppo_megatron.errors import ExpectedError

from .cluster import devices_needed
from .engine import LAST_PORT


def visible_devices() -> list[str]:
    """The GPUs this process may use, by the names CUDA_VISIBLE_DEVICES gives them; empty without CUDA."""
    import torch

    count = torch.cuda.device_count()
    named = [d.strip() for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d.strip()]
    return named[:count] if named else [str(index) for index in range(count)]


def require_gpu() -> None:
    """Raises where torch was built for GPUs and shows none: a rank on the CPU among ranks on GPUs."""
    import torch

    if torch.backends.cuda.is_built() and not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise ExpectedError(
            f"no GPU is visible on {socket.gethostname()} (CUDA_VISIBLE_DEVICES: {visible}), and this rank is to train "
            "on one; see what nvidia-smi says there"
        )


def engine_devices(config: Config, index: int, visible: list[str], *, trains: bool = True) -> list[str]:
    """GPUs of engine `index` on this machine; empty where there are none. `trains`: the first ones are the ranks'."""
    each = config.engine.devices
    first = (_first_of_engines(config) if trains else 0) + index * each
    return visible[first : first + each]


def problems(config: Config) -> list[str]:
    """Why trainer ranks and the engines to start do not fit on this machine's GPUs, and ports that are taken."""
    from dppo_megatron.fleet.registry import port_in_use

    engine = config.engine
    ports = range(engine.port, min(engine.port + config.started_engines, LAST_PORT + 1)) if engine.port else ()
    return gpu_problems(config, visible_devices()) + [
        f"engine.port = {port}: already in use on {engine.host}; choose another, or 0 for a free one"
        for port in ports
        if port_in_use(engine.host, port)
    ]


def unreached(config: Config) -> list[str]:
    """Return a note for each server of `engine.urls` that cannot be reached now; it may start later."""
    out, wait_s = [], config.engine.unavailable_timeout_s
    for url in config.engine.urls if config.samples else ():
        at = urlsplit(url)
        try:
            socket.create_connection((at.hostname, at.port or (443 if at.scheme == "https" else 80)), 2.0).close()
        except OSError as error:
            out.append(f"engine.urls: {url}: {error}; a run waits {wait_s:g} s for it (engine.unavailable_timeout_s)")
    return out


def gpu_problems(config: Config, visible: list[str], *, trains: bool = True) -> list[str]:
    """Why ranks (where it `trains`) and engines do not fit on these GPUs; a machine without any computes on the CPU."""
    engine, engines = config.engine, config.started_engines
    if not visible:
        if config.slurm.gpu is not None:
            return [
                f"slurm.gpu = {config.slurm.gpu}: the run is for GPUs, and {socket.gethostname()} shows none; see what "
                "nvidia-smi and torch.version.cuda say there, start it by `dppo-megatron slurm` from a login node, or "
                "set it to null for a run on CPUs"
            ]
        if engines and engine.expert_parallel and engine.kind == "vllm":
            return ["engine.expert_parallel = true: vLLM's kernels for CPUs need all experts; set it to false"]
        if not engines or not engine.serves_fp8:
            return []
        return [
            f"engine.quantization = {engine.quantization}: needs a GPU, {engine.kind} does not multiply in FP8 on "
            "CPUs; set it to none, or to fp8_block_emulated to study its mismatch"
        ]
    if engines and engine.nodes > 1:
        return [f"engine.nodes = {engine.nodes}: this machine's GPUs are those of one node; set it to 1"]
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
    """`config` with no more engines than `visible` GPUs serve, where no rank trains. Prints a lower number."""
    most = len(visible) // config.engine.devices
    if not most or config.started_engines <= most:
        return config
    print(f"engine.count = {config.engine.count}: {len(visible)} GPUs are visible; lowered to {most}")
    return config.model_copy(update={"engine": config.engine.model_copy(update={"count": most})})


def _first_of_engines(config: Config) -> int:
    return 0 if config.engine.placement == "colocated" else config.parallel.world_size
